"""Publish pages and checkpoints in the background: best effort, in order, each on a lease of its own.

    steps      [ chunk 0 ][ chunk 1 ][ chunk 2 ][ chunk 3 ][ checkpoint ]
    store                [put 0     ][put 1, 2           ][put 3, checkpoint]

A prompt is published while it is computed. Each sequence has one put at a time, of all pages that were
committed when it began.
"""

import asyncio

from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.scheduling.admission_queue import AdmissionQueue
from tidemill.workers.scheduling.sequence import Sequence, StoredPrefix
from tidemill.workers.transfer.transfer import Transfer

PUBLICATIONS_MAX = 64
"""The maximum number of publications of answered prompts. Each one holds its pages."""


class Publisher:
    def __init__(self, ledger: Ledger, transfer: Transfer, admission_queue: AdmissionQueue) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._admission_queue = admission_queue
        self._running: set[asyncio.Task[None]] = set()
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
            self._drop(pieces.pop())  # it has not begun, and the new one covers it
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
            await asyncio.wait({publication.task}, timeout=self._transfer.patience_s(missing))
        return publication.task is None and publication.complete and publication.there_pages >= num_pages

    async def drain(self) -> None:
        """Wait until all publications are stored or refused."""
        while self._running:
            await asyncio.wait(self._running)

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
                self._drop(pieces.popleft())
        finally:
            while pieces:  # nothing is offered after a piece that was not stored
                self._drop(pieces.popleft())
            publication.task = None

    def _drop(self, piece: StoredPrefix) -> None:
        self._ledger.release(piece.lease_id)
        self._admission_queue.memory_freed()
