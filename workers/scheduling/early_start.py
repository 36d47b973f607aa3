"""The early start of a prompt: its first layers run while the pages of later ones arrive.

    fetch   | slice 0 of all pages, state | slice 1 | slice 2 | committed
    step                                  | layers of slice 0 | of 1 | of 2 | landed

Each object of the store has its own seal, so a slice is verified before a layer reads it. The fetch is like a
step in flight of the lease: its pages are committed when all slices are here, before the step can land. If
one does not arrive, the sequence is preempted, and nothing of the step counts.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.execution.step import PagesLost
from tidemill.workers.scheduling.admission_queue import AdmissionQueue
from tidemill.workers.scheduling.prefix_dedup import InProgressPrefixes
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.scheduling.sequences import Sequences
from tidemill.workers.transfer.transfer import OnLate, Transfer


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch slice by slice. `started`: steps may run behind it."""

    sequence: Sequence
    lease: Lease
    keys: Seq[PageKey]
    arrivals: tuple[Future[None], ...]
    has_first: asyncio.Event = field(default_factory=asyncio.Event)  # a slice, or it has ended
    started: bool = False
    late: list[asyncio.Future[int]] = field(default_factory=list[asyncio.Future[int]])


class EarlyStarts:
    """Starts prompts that have the worker to themselves: a step that waits for a slice holds up all its rows
    and the steps behind it."""

    def __init__(
        self,
        ledger: Ledger,
        transfer: Transfer,
        admission_queue: AdmissionQueue,
        in_progress: InProgressPrefixes,
        sequences: Sequences,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._admission_queue = admission_queue
        self._in_progress = in_progress
        self._sequences = sequences
        self._preempt = preempt

    def may_start(self, sequence: Sequence, num_pages: int) -> bool:
        """Return whether steps of the sequence may run while slices of its first `num_pages` are fetched."""
        return (
            self._transfer.num_slices > 1
            and not sequence.restore.lost_slices
            and self._sequences.num_with_memory == 1
            and sequence.computed < num_pages * sequence.page_tokens < sequence.target
        )

    async def fetch(self, sequence: Sequence, keys: Seq[PageKey], num_pages: int, leave: OnLate) -> int:
        """Fetch as `Transfer.fetch` does, slice by slice. Return `num_pages` when the first slice is here and
        the sequence still has the worker to itself; then it has the arrivals of all."""
        assert sequence.lease is not None
        arrivals = tuple(Future[None]() for _ in range(self._transfer.num_slices))
        fetch = _Fetch(sequence, sequence.lease, keys, arrivals)

        def late(moving: asyncio.Future[int]) -> None:
            (fetch.late.append if fetch.started else leave)(moving)

        moving = asyncio.ensure_future(
            self._transfer.fetch(
                fetch.lease, keys, num_pages, late, lambda number: self._arrived(fetch, number)
            )
        )
        moving.add_done_callback(lambda _: fetch.has_first.set())
        try:
            await fetch.has_first.wait()
            if arrivals[-1].done() or moving.done() or not self.may_start(sequence, num_pages):
                return await moving
        except asyncio.CancelledError:
            moving.cancel()
            await asyncio.wait({moving})
            raise
        self._ledger.begin_fetched(fetch.lease, num_pages * sequence.page_tokens)
        self._ledger.counters["early_starts"] += 1
        fetch.started, sequence.restore.arrivals = True, arrivals
        moving.add_done_callback(lambda ended: self._ended(fetch, ended))
        return num_pages

    def _arrived(self, fetch: _Fetch, number: int) -> None:
        if fetch.arrivals[number].done():  # it was late, and the sequence has lost its memory
            return
        if fetch.started and number == len(fetch.arrivals) - 1:
            self._complete(fetch, arrived=True)
        fetch.arrivals[number].set_result(None)
        fetch.has_first.set()

    def _ended(self, fetch: _Fetch, moving: asyncio.Future[int]) -> None:
        """Preempt the sequence unless all slices have arrived. Its memory is used until the transfer ends."""
        if fetch.arrivals[-1].done():
            return
        if not moving.cancelled():
            moving.exception()  # retrieved, so that asyncio does not log it
        for arrival in fetch.arrivals:
            if not arrival.done():
                arrival.set_exception(PagesLost("pages of later layers did not arrive"))
        self._ledger.counters["early_starts_lost"] += 1
        if not fetch.lease.ended:
            fetch.sequence.restore.lost_slices = True
            self._preempt(fetch.sequence)
        if fetch.late:
            fetch.late[0].add_done_callback(lambda _: self._complete(fetch, arrived=False))
        else:
            self._complete(fetch, arrived=False)

    def _complete(self, fetch: _Fetch, *, arrived: bool) -> None:
        before = fetch.lease.committed
        self._ledger.end_fetched(fetch.lease, fetch.keys, arrived=arrived)
        if not fetch.lease.ended:
            fetch.sequence.restore.arrivals = ()
            self._in_progress.advanced(fetch.sequence, before)
        self._admission_queue.memory_freed()
