"""Publish pages and checkpoints in the background: best effort, in order, each on a lease of its own.

    steps      [ chunk 0 ][ chunk 1 ][ chunk 2 ][ chunk 3 ][ checkpoint ]
    store                [put 0     ][put 1, 2           ][put 3, checkpoint]

A prompt is published while it is computed. Each sequence has one put at a time, of all pages that were
committed when it began. The checkpoints on the grid of a prompt come last: while the engine has no request,
one at a time, as far as the store has room.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.spare_value import GRID_PAGES, roundness
from tidemill.workers.scheduling.admission_queue import AdmissionQueue
from tidemill.workers.scheduling.sequence import Sequence, StoredPrefix
from tidemill.workers.transfer.transfer import Transfer

PUBLICATIONS_MAX = 64
"""The maximum number of publications of answered prompts. Each one holds its pages."""

GRIDS_MAX = 64
"""The latest stored prompts whose grid is still to be published."""

GRID_PAUSE_S = 0.05
"""The pause before each checkpoint of a grid: requests that come one after the other leave shorter ones."""


class Publisher:
    def __init__(
        self,
        ledger: Ledger,
        transfer: Transfer,
        admission_queue: AdmissionQueue,
        num_requests: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._admission_queue = admission_queue
        self._num_requests = num_requests
        self._running: set[asyncio.Task[None]] = set()
        self._grids = deque[Seq[PageKey]](maxlen=GRIDS_MAX)  # the keys of stored prompts
        self._grid: asyncio.Task[None] | None = None
        self._serial = 0

    def publish(self, sequence: Sequence, num_pages: int, *, checkpoint: bool = True) -> None:
        """Store the first pages of the sequence, and the checkpoint at their end if there is one."""
        publication = sequence.delivery.publication
        if not sequence.produces and publication.task is None and len(self._running) >= PUBLICATIONS_MAX:
            self._ledger.counters["publications_skipped"] += 1
            return
        pieces = publication.pieces
        offered_pages = pieces[-1].num_pages if pieces else publication.there_pages
        if (offered_pages, False) >= (num_pages, checkpoint):
            return
        if len(pieces) > 1 and not pieces[-1].checkpoint:
            self._release(pieces.pop().lease_id)  # it has not begun, and the new one covers it
        assert sequence.lease is not None
        self._serial += 1
        lease_id = f"{sequence.id}/publish#{self._serial}"
        lease = self._ledger.share(lease_id, sequence.lease, num_pages)
        pieces.append(StoredPrefix(lease_id, lease, num_pages, checkpoint))
        if publication.task is None:
            publication.task = asyncio.create_task(self._run(sequence))
            self._running.add(publication.task)
            publication.task.add_done_callback(self._running.discard)

    async def published(self, sequence: Sequence, num_pages: int) -> bool:
        """Wait for the publications of the sequence. Return whether these first pages and the checkpoint at
        their end are stored. A store that takes longer than its patience has not stored them."""
        publication = sequence.delivery.publication
        if publication.task is not None:
            missing = max(0, num_pages - publication.there_pages)
            await self._transfer.wait_published(publication.task, missing)
        return publication.task is None and publication.complete and publication.there_pages >= num_pages

    def publish_grids(self) -> None:
        """Store the grids of stored prompts in the background, while there is no request."""
        if self._grids and self._grid is None and self._transfer.has_room:
            self._grid = asyncio.create_task(self._publish_grids())

    async def drain(self) -> None:
        """Wait until all publications are stored or refused, but not for grids."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Wait for the checkpoint of a grid that is being stored; the others are left out."""
        if self._grid is not None:
            self._grid.cancel()
            await asyncio.wait([self._grid])

    async def _publish_grids(self) -> None:
        try:
            while self._grids:
                keys = self._grids.pop()
                held = await self._transfer.restorable_depths(keys, 0)
                missing = {*range(GRID_PAGES, len(keys), GRID_PAGES)}.difference(held)
                for depth in sorted(missing, key=_round_first):
                    await asyncio.sleep(GRID_PAUSE_S)
                    if self._running or self._num_requests():
                        self._grids.append(keys)
                        return
                    if not await self._publish_last(keys[:depth]):
                        return
        finally:
            self._grid = None

    async def _publish_last(self, keys: Seq[PageKey]) -> bool:
        """Store the checkpoint at the end of `keys`, if it is here. Return False if the store refuses it."""
        match = self._ledger.index.match(keys)
        if match.restorable_pages < len(keys):
            return True
        self._serial += 1
        lease_id = f"grid#{self._serial}"
        lease = self._ledger.open(lease_id)
        self._ledger.attach(lease, match, len(keys))
        try:
            return await self._transfer.publish_last(lease, keys, spare=not match.path[-1].uses)
        finally:
            self._release(lease_id)

    async def _run(self, sequence: Sequence) -> None:
        publication = sequence.delivery.publication
        pieces = publication.pieces
        try:
            publication.complete = True
            while pieces and publication.complete:
                piece = pieces[0]
                publication.complete = await self._transfer.publish(
                    piece.lease, sequence.keys, publication.there_pages, checkpoint=piece.checkpoint
                )
                if publication.complete:
                    publication.there_pages = piece.num_pages
                self._release(pieces.popleft().lease_id)
            if publication.complete and self._ledger.layout.hybrid and publication.there_pages > GRID_PAGES:
                self._grids.append(sequence.keys[: publication.there_pages])
        finally:
            while pieces:  # nothing is offered after a piece that was not stored
                self._release(pieces.popleft().lease_id)
            publication.task = None

    def _release(self, lease_id: str) -> None:
        self._ledger.release(lease_id)
        self._admission_queue.memory_freed()


def _round_first(depth: int) -> tuple[int, int]:
    return -roundness(depth), -depth
