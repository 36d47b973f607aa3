"""Bugs to plant in the transfers between a worker and the page store."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a piece is stored before the piece ahead of it",
        "workers/transfer/staging.py::StagingRing._put_piece",
        ") if $BEFORE is not None: await $ASYNCIO.$WAIT({$BEFORE}) if",
        ")\n            if",
        "tests/unit/workers/transfer/test_staging.py",
    ),
    Planted(
        "a failed read overwrites the arena",
        "workers/transfer/staging.py::StagingRing._get_piece",
        "if $OUTCOME is $GOT.$HIT",
        "if $OUTCOME",
        "tests/unit/workers/transfer/test_staging.py",
    ),
    Planted(
        "a fetched prompt runs without its state",
        "workers/transfer/transfer.py::Transfer.fetch",
        "$WANTED.$APPEND($MOVED($KIND.$CHECKPOINT, $KEYS[$NUM_PAGES - 1], $LEASE.$FETCH_SLOT))",
        "pass",
        "tests/unit/workers/transfer/test_transfer.py",
    ),
    Planted(
        "a damaged object is accepted",
        "workers/transfer/transfer.py::RankTransfer.get",
        "is $GOT.$HIT for",
        "is not $GOT.MISS for",
        "tests/unit/workers/transfer/test_transfer.py",
    ),
    Planted(
        "the checkpoint is published before its pages",
        "workers/transfer/transfer.py::Transfer.publish",
        "$STORED = await self.$PUT($PAGES + $LAST)",
        "$STORED = await self.$PUT($LAST + $PAGES)",
        "tests/unit/workers/transfer/test_transfer.py",
    ),
)
