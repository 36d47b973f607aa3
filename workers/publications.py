"""Publishes pages and checkpoints in the background: best effort, on leases of their own."""

import asyncio

from tidemill.kvstore.ledger import Ledger
from tidemill.workers.line import Line
from tidemill.workers.sequence import Sequence
from tidemill.workers.transfer import Transfer

PUBLICATIONS_MAX = 64
"""At once; each one holds its pages."""


class Publications:
    def __init__(self, ledger: Ledger, transfer: Transfer, line: Line) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._line = line
        self._running: set[asyncio.Task[None]] = set()
        self._serial = 0

    def publish(self, sequence: Sequence, num_pages: int) -> None:
        """Store the first pages of the sequence and the checkpoint at their end."""
        if len(self._running) >= PUBLICATIONS_MAX:
            self._ledger.counters["publications_skipped"] += 1
            return
        assert sequence.lease is not None
        self._serial += 1
        lease_id = f"{sequence.id}/publish#{self._serial}"
        lease = self._ledger.share(lease_id, sequence.lease, num_pages)
        keys = sequence.keys[:num_pages]

        async def publish() -> None:
            try:
                await self._transfer.publish(lease, keys)
            finally:
                self._ledger.release(lease_id)
                self._line.memory_freed()

        task = asyncio.create_task(publish())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self) -> None:
        """Wait until what was being published is stored, or was refused."""
        while self._running:
            await asyncio.wait(self._running)
