"""Admission: takes memory for a sequence, and restores it as deep as worker and store together can.

    0          restorable here      kept here      depth in the store        boundary    known tokens
    |----- reused -----|-----------------|------------------|--------------------|---- tail ----|
                                         |----- fetched ----|-------------- computed -----------|

Pages that are kept here beyond the restorable depth spare their fetch. Without a checkpoint at or above them
they are computed again, and the place where they end is a junction: this time a checkpoint is made there.
"""

import asyncio
from collections.abc import Sequence as Seq

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.ledger import Ledger
from tidemill.workers.messages import PagesMissing, Provenance
from tidemill.workers.sequence import Sequence
from tidemill.workers.transfer import Transfer

CHECKPOINT_PAGES_MIN = 4
"""Pages between checkpoints of a long prompt, at least, for models whose states are small."""


class Admission:
    """First come, first served: the head of the queue waits for memory, the others wait for the head."""

    def __init__(self, ledger: Ledger, transfer: Transfer) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._head = asyncio.Lock()
        self._freed = asyncio.Event()

    def memory_freed(self) -> None:
        self._freed.set()

    async def admit(self, sequence: Sequence) -> None:
        """Give `sequence` a lease that holds all its known tokens, restored as deep as possible.

        Raises PagesMissing when more remains to be computed than the request allows. The caller releases the
        lease.
        """
        keys = sequence.keys[: sequence.boundary // sequence.page_tokens]
        here = self._ledger.index.match(keys).restorable_pages
        depths = await self._transfer.restorable_depths(keys, here) if here < len(keys) else []
        while True:
            async with self._head:
                attached = await self._take_memory(sequence, keys, depths)
            if not depths or await self._fetch(sequence, keys, depths):
                break
            self._ledger.release(sequence.id)
            sequence.lease = None
            self.memory_freed()
        depth = sequence.computed
        reused = min(depth, attached * sequence.page_tokens)
        sequence.provenance = Provenance(
            reused_tokens=reused, fetched_tokens=depth - reused, computed_tokens=sequence.target - depth
        )
        gap_tokens_max = sequence.request.gap_tokens_max
        if (
            gap_tokens_max is not None
            and not sequence.produces
            and sequence.boundary - depth > gap_tokens_max
        ):
            raise PagesMissing(
                f"{sequence.request.request_id} resumes at {depth} of {sequence.boundary} tokens: "
                f"more than {gap_tokens_max} are missing"
            )

    async def _take_memory(self, sequence: Sequence, keys: Seq[PageKey], depths: list[int]) -> int:
        """Attach what is kept here and reserve the rest; answers the number of pages attached.

        `depths` loses those that are no deeper than what can be restored here.
        """
        while True:
            self._freed.clear()
            lease = sequence.lease = self._ledger.open(sequence.id)
            match = self._ledger.index.match(keys)
            depths[:] = [depth for depth in depths if depth > match.restorable_pages]
            attached = min(len(match.path), depths[-1]) if depths else match.restorable_pages
            self._ledger.attach(lease, match, attached)
            sequence.junction = len(match.path) * sequence.page_tokens
            sequence.cuts = self._cuts(sequence)
            try:
                self._ledger.reserve(lease, len(sequence.tokens))
            except OutOfMemory:
                self._ledger.release(sequence.id)
                sequence.lease = None
                if self._ledger.num_leases:
                    await self._freed.wait()
                else:
                    self._ledger.forget()
            else:
                return attached

    def _cuts(self, sequence: Sequence) -> list[int]:
        """Where checkpoints are wanted: at the junction, at the last page boundary, and on a grid so wide
        that they take no more memory than the pages between them."""
        layout = self._ledger.layout
        state_pages = layout.state_stride_bytes // layout.page_bytes
        interval = max(CHECKPOINT_PAGES_MIN, state_pages) * layout.page_tokens
        return [*range(interval, sequence.boundary, interval), sequence.junction, sequence.boundary]

    async def _fetch(self, sequence: Sequence, keys: Seq[PageKey], depths: list[int]) -> bool:
        """Resume at the deepest of `depths`; if it does not arrive whole, `depths` keeps those still open."""
        lease = sequence.lease
        assert lease is not None
        target = depths.pop()
        good = await self._transfer.fetch(lease, keys, target)
        if good == target or (good > len(lease.entries) and not self._ledger.layout.hybrid):
            self._ledger.adopt(lease, good * sequence.page_tokens, keys)
            return True
        depths[:] = [depth for depth in depths if depth <= good]
        return False
