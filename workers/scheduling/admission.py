"""Admission: take memory for a sequence, and restore it as deep as worker and store together can.

    0          restorable here      kept here      depth in the store        boundary    known tokens
    |----- reused -----|-----------------|------------------|--------------------|---- tail ----|
                                         |----- fetched ----|-------------- computed -----------|

Pages that are kept here beyond the restorable depth need no fetch. Without a checkpoint at or above them
they are computed again. The depth where they end is a junction, and this time it gets a checkpoint.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import CHECKPOINTS, PAGES, STATES, WINDOWS, Layout
from tidemill.kvstore.memory.lease import SequenceText
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import Match
from tidemill.kvstore.memory.spare_value import GRID_PAGES
from tidemill.kvstore.memory.windows import count_missing
from tidemill.workers.cache_lookup import CacheLookup, LookupEviction
from tidemill.workers.messages import PagesMissing, Provenance
from tidemill.workers.scheduling.admission_queue import AdmissionQueue, Precedence
from tidemill.workers.scheduling.early_start import EarlyStarts
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.prefix_dedup import InProgressPrefixes
from tidemill.workers.scheduling.recent_texts import RecentTexts
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.scheduling.sequences import Sequences
from tidemill.workers.transfer.transfer import Transfer

PREEMPTIONS_BEFORE_FIT = 2
PREEMPTIONS_MAX = 3
"""The maximum number of preemptions of a request, apart from those for a smaller budget. After the second,
the request is admitted only when it and all older ones fit up to their ends. After the third, it is admitted
when it is the oldest, which is never preempted."""


def states_of_request(layout: Layout) -> dict[str, int]:
    """Return the most states that a request needs, by class: it reads one and writes another while the
    checkpoint before them is still kept. From one of another class it is copied to the one that it writes."""
    return {STATES: 2, CHECKPOINTS: 2} if layout.converts else {STATES: 3}


class _Taken(NamedTuple):
    """The memory that a sequence got: pages attached, pages kept here, whether another page follows those in
    place of the sequence's own, and deeper depths to fetch, ascending."""

    attached_pages: int
    kept_pages: int
    diverges: bool
    depths: list[int]


class Admission:
    """Gives memory to waiting requests, the oldest first; the others wait for it."""

    def __init__(
        self,
        ledger: Ledger,
        transfer: Transfer,
        admission_queue: AdmissionQueue,
        sequences: Sequences,
        limits: EngineLimits,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self.admission_queue = admission_queue
        self._sequences = sequences
        self._limits = limits
        self.in_progress = InProgressPrefixes(ledger.index, sequences.precedence)
        self._early_starts = EarlyStarts(
            ledger, transfer, admission_queue, self.in_progress, sequences, preempt
        )
        self.texts = RecentTexts()
        self._serial = 0

    async def admit(self, sequence: Sequence) -> None:
        """Give `sequence` a lease that holds all its known tokens, restored as deep as possible.

        Raises PagesMissing when more remains to be computed than the request allows. The caller releases the
        lease.
        """
        await self.in_progress.wait(sequence)
        keys = sequence.keys[: sequence.restorable // sequence.page_tokens]
        here = self._ledger.index.match(keys).restorable_pages
        depths = await self._transfer.restorable_depths(keys, here) if here < len(keys) else []
        sequence.restore.stored_pages, sequence.restore.store = max(depths, default=0), ""
        sequence.restore.arrivals = ()
        while True:
            taken = await self._take_memory(sequence, keys, depths)
            if taken is None:
                await self.in_progress.wait(sequence)
                continue
            if not taken.depths:
                break
            depths = await self._fetch(sequence, keys, taken.depths)
            if depths is None:
                break
            if sequence.lease is not None:
                self._ledger.release(sequence.id)
                sequence.lease = None
                self.admission_queue.memory_freed()
        self.in_progress.advanced(sequence, 0)
        depth = sequence.launched
        prefetched = sequence.restore.prefetched_pages
        num_prefetched = len(range(prefetched.start, min(prefetched.stop, taken.attached_pages)))
        reused = min(depth, (taken.attached_pages - num_prefetched) * sequence.page_tokens)
        asked = sequence.request.cache_diagnostics
        sequence.provenance = Provenance(
            reused_tokens=reused,
            fetched_tokens=depth - reused,
            computed_tokens=sequence.target - depth,
            lookup=self._look_up(sequence, keys, taken) if asked or depth < sequence.restorable else None,
        )
        found = taken.kept_pages * sequence.page_tokens
        counters = self._ledger.counters
        counters["prefix_queried_tokens"] += len(keys) * sequence.page_tokens
        counters["prefix_found_tokens"] += found
        counters["prefix_resumed_tokens"] += depth
        counters["kv_hit_without_state_tokens"] += max(0, found - depth)
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

    def _look_up(self, sequence: Sequence, keys: Seq[PageKey], taken: _Taken) -> CacheLookup:
        """Return why the sequence resumes no deeper, as far as this worker knows."""
        size, restore = sequence.page_tokens, sequence.restore
        matched = taken.kept_pages * size
        pages = sequence.computed // size
        found = None if pages == len(keys) else self._ledger.evictions.deepest(keys, pages)
        eviction = None
        if found is not None:
            depth, (reason, at_s, tenant, expired) = found
            ago_s = max(0.0, self._ledger.index.now_s - at_s)
            eviction = LookupEviction(depth * size, reason, ago_s, tenant, expired)
        other_text = (matched, matched + size - 1) if taken.diverges else None
        other_salt = 0
        if sequence.request.cache_diagnostics:
            difference = self.texts.first_difference(sequence, self._sequences.running.values())
            if difference is not None and difference[0] >= matched:
                at, goes_on = difference
                other_text = (at, at) if goes_on and 0 < at < len(sequence.tokens) else None
            if not matched and keys:
                other_salt = self.texts.depth_under_other_salt(sequence, self._ledger.index)
        return CacheLookup(
            matched=matched,
            eviction=eviction,
            stored=restore.stored_pages * size,
            store=restore.store or ("down" if self._transfer.is_down else ""),
            other_text=other_text,
            other_salt=other_salt,
        )

    async def _take_memory(self, sequence: Sequence, keys: Seq[PageKey], depths: Seq[int]) -> _Taken | None:
        """Attach the pages that are here and reserve the rest. Return None when another request has begun to
        compute the prefix."""
        while True:
            # In the queue it would block the older ones that it waits for.
            while not self._may_come(sequence):
                self.admission_queue.forget_change()
                await self.admission_queue.changed()
            precedence = self._precedence(sequence, keys, depths)
            async with self.admission_queue.wait_until_first(precedence):
                while not self.admission_queue.has_older(precedence):
                    self.admission_queue.forget_change()
                    if self.in_progress.is_made(sequence):
                        return None
                    now = self._precedence(sequence, keys, depths)
                    if now > precedence or not self._may_come(sequence):
                        break  # others may precede it: a part of its prefix was evicted, or an older one came
                    taken = self._try_memory(sequence, keys, depths, now)
                    if taken is not None:
                        return taken
                    await self.admission_queue.changed()

    def _precedence(self, sequence: Sequence, keys: Seq[PageKey], depths: Seq[int]) -> Precedence:
        """Return the precedence of a waiting sequence, by what worker and store can restore now."""
        pages = max(self._ledger.index.match(keys).restorable_pages, *depths[-1:], 0)
        return self._sequences.precedence(sequence, pages * sequence.page_tokens)

    def _try_memory(
        self, sequence: Sequence, keys: Seq[PageKey], depths: Seq[int], precedence: Precedence
    ) -> _Taken | None:
        """Take memory, or return None when it does not suffice, or when the next steps are full of prompts
        that precede this one."""
        if (
            self._sequences.num_with_memory >= self._limits.budget.rows_max
            or self._ledger.excess
            or self._sequences.tokens_before(precedence) >= self._limits.in_flight_tokens
        ):
            return None
        match = self._ledger.index.match(keys)
        deeper = [depth for depth in depths if depth > match.restorable_pages]
        target = deeper[-1] if deeper else None
        attached = match.restorable_pages if target is None else min(len(match.path), target)
        if not self._lease(sequence, match, attached, target):
            if self._ledger.num_leases or not attached:
                return None
            attached = 0  # its own prefix is so fragmented that nothing else fits beside it
            if not self._lease(sequence, match, attached, target):
                return None
        sequence.restore.junctions.add(len(match.path) * sequence.page_tokens)
        sequence.restore.cuts = {sequence.boundary}
        interval = GRID_PAGES * sequence.page_tokens
        sequence.restore.grid = range(interval, sequence.boundary, interval)
        diverges = 0 < len(match.path) < len(keys) and bool(match.path[-1].children)
        return _Taken(attached, len(match.path), diverges, deeper)

    def _lease(self, sequence: Sequence, match: Match, attached: int, target: int | None) -> bool:
        """Return whether the lease got memory for its next steps, the promise of pages for all known tokens,
        room for the most window pages that they need together, and the window pages of the checkpoint at
        `target` pages.

        A page is left free for each running request. Otherwise its next page would preempt this request
        again.
        """
        spare_slots_min = int(self._limits.checkpoint_strategy == "double" and not sequence.produces)
        request = sequence.request
        text = SequenceText(sequence.tokens, request.salt, request.tenant)
        lease = self._ledger.open(sequence.id, spare_slots_min=spare_slots_min, text=text)
        self._ledger.attach(lease, match, attached)
        try:
            held = self._sequences.num_with_memory
            beside = held + 1 if held else 0
            start, length = lease.committed, len(sequence.tokens)
            if target is not None:
                self._ledger.reserve_fetched(lease, target)
                start = target * sequence.page_tokens
            ahead = min(length, start + self._limits.in_flight_tokens)
            later = max(
                0, -(-length // lease.page_tokens) - max(-(-ahead // lease.page_tokens), len(lease.pages))
            )
            at_once = self._windows(length) - len(lease.windows)
            at_once -= count_missing(self._ledger.layout, lease, ahead)
            headroom = {PAGES: beside + later, WINDOWS: max(0, at_once)}
            self._ledger.reserve(lease, ahead, headroom=headroom, windows_end=ahead)
            self._ledger.promise(lease, length)
        except OutOfMemory:
            self._ledger.release(sequence.id)
            return False
        resumed = attached if target is None else target
        self._ledger.spares.add_prompt(match.path, resumed, sequence.boundary // lease.page_tokens)
        self._ledger.index.use(lease.shared_entries)
        self._ledger.retention.renew(lease.shared_entries)
        sequence.lease = lease
        return True

    def _windows(self, num_tokens: int) -> int:
        """Return the most window pages that a request of `num_tokens` needs together."""
        return self._ledger.layout.peak_windows(num_tokens, self._limits.in_flight_tokens)

    def _may_come(self, sequence: Sequence) -> bool:
        """Return whether a request that was preempted often is unlikely to be preempted again."""
        if sequence.restore.preemptions < PREEMPTIONS_BEFORE_FIT:
            return True
        older = self._sequences.older_than(sequence)
        if not older:
            return True
        if sequence.restore.preemptions >= PREEMPTIONS_MAX:
            return False
        layout = self._ledger.layout
        rows = [*older, sequence]
        needed = {
            PAGES: sum(-(-running.end // layout.page_tokens) for running in rows),
            **{name: len(rows) * count for name, count in states_of_request(layout).items()},
            WINDOWS: sum(self._windows(running.end) for running in rows),
        }
        return layout.extents_for(needed) <= self._ledger.budget_extents

    async def _fetch(self, sequence: Sequence, keys: Seq[PageKey], depths: Seq[int]) -> list[int] | None:
        """Resume at the deepest of `depths`, and return None, perhaps while slices of its pages arrive.

        If it does not arrive whole, return the depths that are still open: none if it is late.
        """
        lease = sequence.lease
        assert lease is not None
        *others, target = depths
        began_s = asyncio.get_running_loop().time()
        leave = partial(self._leave, sequence)
        sliced = self._early_starts.may_start(sequence, target)
        if sliced:
            good = await self._early_starts.fetch(sequence, keys, target, leave)
        else:
            good = await self._transfer.fetch(lease, keys, target, leave)
        sequence.restore.fetch_s += asyncio.get_running_loop().time() - began_s
        sequence.restore.store = "late" if sequence.lease is None else "" if good == target else "failed"
        if sequence.lease is None:
            return []
        if sequence.restore.arrivals:
            return None
        if sliced and good < target:
            sequence.restore.lost_slices = True
            return [*depths]
        if good == target or (good > len(lease.shared_entries) and not self._ledger.layout.hybrid):
            self._ledger.adopt(lease, good * sequence.page_tokens, keys)
            return None
        return [depth for depth in others if depth <= good]

    def _leave(self, sequence: Sequence, moving: asyncio.Future[int]) -> None:
        """Give back what the sequence holds when `moving` has ended. Nothing waits for it."""
        self._serial += 1
        lease_id = f"{sequence.id}/late#{self._serial}"
        self._ledger.rename(sequence.id, lease_id)
        sequence.lease = None
        self._ledger.counters["fetches_late"] += 1

        def ended(_: asyncio.Future[int]) -> None:
            self._ledger.release(lease_id)
            self.admission_queue.memory_freed()

        moving.add_done_callback(ended)
