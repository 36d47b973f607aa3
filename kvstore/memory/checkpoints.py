"""Turns states and windows of leases into checkpoints, and finds slots for their next steps.

A checkpoint is made without a copy: the slot with the state at a page boundary goes to the index,
and the next step reads it there and writes to another slot. The state at a page boundary inside a
step is written to a slot of its own, which goes to the index. Lease and index share the last window.
"""

from collections.abc import Sequence
from contextlib import suppress

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import STATES, StateId
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.demand import CHECKPOINT_STATE, FailAllocation
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.spare_value import GRID_PAGES, roundness
from tidemill.kvstore.memory.windows import last_window


class Checkpoints:
    """The checkpoints of leases over one cache, at most `per_path` on the path of a lease."""

    def __init__(self, cache: Cache, per_path: int, fail_allocation: FailAllocation) -> None:
        self._cache = cache
        self._layout = cache.layout
        self._per_path = per_path
        self._fail_allocation = fail_allocation

    def keep(self, lease: Lease, *, last: bool = False, spare: bool = False) -> bool:
        """Turn the state at `committed`, a page boundary, into a checkpoint, unless there is one.

        The next step reads it there and writes to another slot; with `last` there is no next step.
        A checkpoint is optional: return False and change nothing when no second slot is free, or
        when the step in flight overwrites the state.
        A spare one replaces only what has less credit, and counts for no limit.
        """
        has_slot = any(not flight.void for flight in lease.flights)
        if spare and not has_slot and not self.find_spare_slot(lease, lease.committed):
            return False
        kept = self._keep(lease, last=last, spare=spare)
        if kept and not spare:
            self._thin(lease.shared_entries[-1])
        return kept

    def find_spare_slot(self, lease: Lease, depth: int) -> bool:
        """Return whether a slot is free for a spare checkpoint at `depth`. If need be, drop another spare one
        with no more credit for it, or evict what has less."""
        if not self._layout.has_states or self._cache.state_is_free():
            return True
        index = self._cache.index
        credit = self._spare_credit(lease, depth)
        victim = self._least_useful_spare(lease)
        if victim is None or (lost := index.credit(victim)) > credit:
            return self._cache.free_state_below(credit, lease.text.tenant)
        index.age(lost)
        self._cache.drop_checkpoint(victim, "states", lease.text.tenant)
        return True

    def slots_inside(
        self, lease: Lease, inside: Sequence[int], spare: Sequence[int]
    ) -> list[tuple[int, StateId]]:
        """Return the depths that get a slot, ascending, each with its slot: the deepest of `inside`, then the
        roundest of `spare`."""
        kept = self._take_slots(lease, len(inside))
        round_first = sorted(spare, key=lambda depth: (-roundness(depth), -depth))
        free = self._take_free_slots(lease, round_first)
        deepest = zip(reversed(inside), kept, strict=False)
        return sorted([*deepest, *zip(round_first, free, strict=False)])

    def keep_inside(self, lease: Lease, depth: int, *, spare: bool) -> None:
        """Turn the state at `depth`, a page boundary inside a completed step, into a checkpoint, unless there
        is one."""
        entry = lease.shared_entries[depth // self._layout.page_tokens - 1]
        if self._layout.hybrid and entry.checkpoint is None:
            self._move_state(lease, entry, depth, spare=spare)
            if not spare:
                self._thin(entry)

    def roll(self, lease: Lease) -> bool:
        """Replace the last checkpoint made while decoding by one at `committed`, a page boundary.

        Return False and keep the earlier one when no second slot can be had; the caller retries at
        the next page boundary.
        """
        entry = self._boundary(lease)
        if not self._layout.hybrid or entry.checkpoint is not None:
            return True
        if not self._keep(lease, last=False):
            return False
        for slot in self._drop_rolling(lease):
            self.return_slot(lease, slot)
        lease.rolling = entry
        self._thin(entry)
        return True

    def borrow_slot(self, lease: Lease) -> bool:
        """Ensure that the lease has a spare slot, and return whether it has. When no slot is free, the slot
        of the checkpoint that the new one replaces is tried first, and then eviction."""
        if not lease.spare_slots and not self._cache.state_is_free():
            lease.spare_slots += self._drop_rolling(lease)
        refused = not self._cache.could_hold({STATES: 1}) or self._fail_allocation(CHECKPOINT_STATE)
        if not (lease.spare_slots or refused):
            with suppress(OutOfMemory):
                lease.spare_slots.append(self._cache.take(STATES, lease.text.tenant))
        return bool(lease.spare_slots)

    def return_slot(self, lease: Lease, slot: StateId) -> None:
        """Keep a slot that is no longer needed as a spare, or free it."""
        if len(lease.spare_slots) < lease.spare_slots_min + (not lease.writes_in_place(0)):
            lease.spare_slots.append(slot)
        else:
            self._cache.pools[STATES].unpin(slot)

    def take_back_optional(self, lease: Lease) -> bool:
        """Take back what the lease holds for its checkpoints; return whether there was any.

        If no other lease reads the checkpoint that the next step reads, that step overwrites it
        instead. The second slot of the strategy `double` is freed; it is borrowed when needed, as
        with `lazy`.
        """
        source = lease.source
        if source is not None and source.checkpoint_pins == 1 and self._layout.has_states:
            lease.source = None
            if lease.rolling is source:
                lease.rolling = None
            self._cache.unpin_checkpoint(source)
            self._cache.note(source, "run", lease.text.tenant)
            [lease.states[lease.committed]] = self._cache.reclaim_checkpoint(source)
            self._cache.counters["evicted_checkpoints_for_run"] += 1
        elif not lease.spare_slots_min:
            return False
        lease.spare_slots_min = 0
        while lease.spare_slots:
            self._cache.pools[STATES].unpin(lease.spare_slots.pop())
        return True

    def _take_slots(self, lease: Lease, most: int) -> list[StateId]:
        """Return up to `most` slots for states inside its next step. Those of a missing slot are skipped."""
        slots: list[StateId] = []
        while len(slots) < most:
            if not self.borrow_slot(lease):
                self._cache.counters["checkpoints_skipped"] += most - len(slots)
                break
            slots.append(lease.spare_slots.pop())
        return slots

    def _take_free_slots(self, lease: Lease, depths: Sequence[int]) -> list[StateId]:
        """Return slots for spare checkpoints at the first of `depths`, until there is none for the next."""
        slots: list[StateId] = []
        with suppress(OutOfMemory):  # another process may have the memory
            for depth in depths:
                refused = self._fail_allocation(CHECKPOINT_STATE)
                if refused or not self.find_spare_slot(lease, depth):
                    break
                slots.append(self._cache.take(STATES, lease.text.tenant))
        return slots

    def _spare_credit(self, lease: Lease, depth: int) -> float:
        """Return the credit of a spare checkpoint at `depth` on the path of `lease`."""
        size, path = self._layout.page_tokens, lease.shared_entries
        at = depth // size
        before = range(min(at - 1, len(path)), max(0, at - roundness(at)), -1)
        start = next((above for above in before if path[above - 1].checkpoint and path[above - 1].uses), 0)
        return self._cache.spares.credit(start, at)

    def _least_useful_spare(self, lease: Lease) -> Entry | None:
        """Return the oldest spare checkpoint at which no request has resumed, or None.

        If it is on the path of `lease`, return the least round one of that path. So those of a prompt that is
        too long lie farther apart where they are shallower.
        """
        oldest = self._cache.index.cheapest_checkpoint()
        if oldest is None or oldest.uses:
            return None
        path = lease.shared_entries[GRID_PAGES - 1 :: GRID_PAGES]
        if oldest not in path:
            return oldest
        own = [entry for entry in path if entry.checkpoint and not (entry.uses or entry.checkpoint_pins)]
        return min(own, key=lambda entry: roundness(entry.depth_pages))

    def _keep(self, lease: Lease, *, last: bool, spare: bool = False) -> bool:
        entry = self._boundary(lease)
        if not self._layout.hybrid or entry.checkpoint is not None:
            if last and self._layout.hybrid and lease.source is None:
                lease.source = self._cache.pin_checkpoint(entry)
            return True
        in_flight = next((flight for flight in lease.flights if not flight.void), None)
        continues = in_flight is None and not last
        if self._layout.has_states and (
            lease.committed not in lease.states or (continues and not self.borrow_slot(lease))
        ):
            self._cache.counters["checkpoints_skipped"] += 1
            return False
        self._move_state(lease, entry, lease.committed, spare=spare)
        (in_flight or lease).source = self._cache.pin_checkpoint(entry)
        return True

    def _move_state(self, lease: Lease, entry: Entry, depth: int, *, spare: bool) -> None:
        """Turn the state of the lease at `depth`, if it has one, and its window there into a checkpoint."""
        states = (lease.states.pop(depth),) if depth in lease.states else ()
        kept = Checkpoint(states, last_window(self._layout, lease, depth))
        credit = self._spare_credit(lease, depth) if spare else 0.0
        self._cache.keep_checkpoint(entry, kept, spare=spare, credit=credit)

    def _boundary(self, lease: Lease) -> Entry:
        assert lease.committed % self._layout.page_tokens == 0
        assert lease.committed > 0
        return lease.shared_entries[-1]

    def _drop_rolling(self, lease: Lease) -> tuple[StateId, ...]:
        """Move the slot of the previous rolling checkpoint to the lease, unless a step reads it."""
        earlier = lease.rolling
        if earlier is None or earlier.checkpoint is None or earlier.checkpoint_pins:
            return ()
        lease.rolling = None
        return self._cache.reclaim_checkpoint(earlier)

    def _thin(self, entry: Entry) -> None:
        """Drop surplus checkpoints above the one of `entry`, but no spare ones; those at junctions stay
        longest."""
        above = [earlier for earlier in self._cache.index.checkpoints_above(entry) if earlier.uses]
        surplus = len(above) + 1 - self._per_path
        unpinned = [earlier for earlier in above if not earlier.checkpoint_pins]
        unpinned.sort(key=lambda earlier: (len(earlier.children) > 1, self._cache.index.rank(earlier)))
        for earlier in unpinned[: max(0, surplus)]:
            self._cache.drop_checkpoint(earlier, "cap")
