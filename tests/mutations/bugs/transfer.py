"""Bugs to plant in the transfers between a worker and the page store."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "a pause of the machine counts as a step time",
        "workers/transfer/speed_model.py::StepTimeModel._take_recent",
        "$SECONDS if self.$FITTED is None else $NP.$MAXIMUM($SECONDS, $TERMS @ self.$FITTED",
        "$NP.full(len(recent), 0.01",
        "tests/unit/workers/transfer/test_speed_model.py",
    ),
    Planted(
        "decoding makes a worker forget its prefill speed",
        "workers/transfer/speed_model.py::StepTimeModel.__init__",
        "$WITHOUT = $SUMS() # $APART",
        "$WITHOUT = self._with_prompts  # $APART",
        "tests/unit/workers/transfer/test_speed_model.py",
    ),
    Planted(
        "a step that is noticed with the one before it seems to take no time",
        "workers/transfer/speed_model.py::StepTimeModel.stepped",
        "if followed and",
        "if False and",
        "tests/unit/workers/transfer/test_speed_model.py",
    ),
    Planted(
        "a store that was slow once is never tried again",
        "workers/transfer/speed_model.py::Throughput._is_over",
        "return $NOW - self.$LAST > $LASTS",
        "return False",
        "tests/unit/workers/transfer/test_speed_model.py",
    ),
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
    Planted(
        "a device that fails in a copy is blamed on the request",
        "workers/transfer/staging.py::_together",
        "if is_sticky($FIRST):",
        "if False:",
        "tests/unit/workers/transfer/test_staging.py",
    ),
)
