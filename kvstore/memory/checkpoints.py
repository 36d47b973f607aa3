"""Turns states and windows of leases into checkpoints, and finds slots for their next steps.

A checkpoint is made without a copy: the slot with the state at a page boundary goes to the index,
and the next step reads it there and writes to another slot. The state at a page boundary inside a
step is written to a slot of its own, which goes to the index. Lease and index share the last window.

Where checkpoints are a class of their own, a step copies its states to their slots when it has run, and the
lease keeps the states. A step that goes on from a checkpoint first copies it to the slot that it writes.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import CHECKPOINTS, STATES, CheckpointId, StateId
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.demand import CHECKPOINT_STATE, FailAllocation
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease, StateSave, StateWrite, StepInFlight
from tidemill.kvstore.memory.spare_value import GRID_PAGES, roundness
from tidemill.kvstore.memory.windows import last_window


def roundest(depths: Sequence[int]) -> list[int]:
    """Return the depths, the roundest first."""
    return sorted(depths, key=lambda depth: (-roundness(depth), -depth))


class Checkpoints:
    """The checkpoints of leases over one cache, at most `per_path` on the path of a lease."""

    def __init__(self, cache: Cache, per_path: int, fail_allocation: FailAllocation) -> None:
        self._cache = cache
        self._layout = cache.layout
        self._class = cache.layout.saved
        self._per_path = per_path
        self._fail_allocation = fail_allocation

    def keep(self, lease: Lease, *, last: bool = False, spare: bool = False) -> bool:
        """Turn the state at `committed`, a page boundary, into a checkpoint, unless there is one.

        The next step reads it there and writes to another slot; with `last` there is no next step.
        A checkpoint is optional: return False and change nothing when no second slot is free, or
        when the step in flight overwrites the state. In a class of their own it needs a copy.
        A spare one replaces only what has less credit, and counts for no limit.
        """
        has_slot = self._layout.converts or any(not flight.void for flight in lease.flights)
        if spare and not has_slot and not self.find_spare_slot(lease, lease.committed):
            return False
        kept = self._keep(lease, last=last, spare=spare)
        if kept and not spare:
            self._thin(lease.shared_entries[-1])
        return kept

    def find_spare_slot(self, lease: Lease, depth: int) -> bool:
        """Return whether a slot is free for a spare checkpoint at `depth`. If need be, drop another spare one
        with no more credit for it, or evict what has less."""
        if not self._layout.has_states or self._cache.is_free(self._class):
            return True
        index = self._cache.index
        credit = self._spare_credit(lease, depth)
        victim = self._least_useful_spare(lease)
        if victim is None or (lost := index.credit(victim)) > credit:
            return self._cache.free_below(credit, self._class, lease.text.tenant)
        index.age(lost)
        self._cache.drop_checkpoint(victim, self._class, lease.text.tenant)
        return True

    def slots_inside(
        self, lease: Lease, inside: Sequence[int], spare: Sequence[int]
    ) -> list[tuple[int, Any]]:
        """Return the depths that get a slot, ascending, each with its slot: the deepest of `inside`, then the
        roundest of `spare`."""
        kept = self._take_slots(lease, len(inside))
        round_first = roundest(spare)
        free = self._take_free_slots(lease, round_first)
        deepest = zip(reversed(inside), kept, strict=False)
        return sorted([*deepest, *zip(round_first, free, strict=False)])

    def copy(self, lease: Lease, flight: StepInFlight, depths: Sequence[int]) -> None:
        """Let the step copy its states at these depths to checkpoints, the first ones first, until there is
        no slot for one, or no state inside the step to copy from."""
        for depth in depths:
            inside = depth not in lease.states
            state = self._state_inside(lease, flight, depth) if inside else lease.states[depth]
            slot = None if state is None else self._slot_of_copy(lease, flight, depth)
            if state is None or slot is None:
                if state is not None and inside:
                    self.return_slot(lease, STATES, state)
                self._cache.counters["checkpoints_skipped"] += depth not in flight.spare
                return
            if inside:
                flight.writes = tuple(sorted((*flight.writes, StateWrite(depth, state))))
            lease.states[depth], lease.saved[depth] = state, slot
            flight.saves += (StateSave(state, slot),)

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
            self.return_slot(lease, self._class, slot)
        lease.rolling = entry
        self._thin(entry)
        return True

    def borrow_slot(self, lease: Lease) -> bool:
        """Ensure that the lease has a spare slot of a checkpoint, and return whether it has. When no slot is
        free, the slot of the checkpoint that the new one replaces is tried first, and then eviction."""
        spare_slots = lease.held[self._class]
        if not spare_slots and not self._cache.is_free(self._class):
            spare_slots += self._drop_rolling(lease)
        if not spare_slots and (slot := self._borrow(lease, self._class)) is not None:
            spare_slots.append(slot)
        return bool(spare_slots)

    def return_slot(self, lease: Lease, name: str, slot: Any) -> None:  # noqa: ANN401  an id of that class
        """Keep a slot of a class that is no longer needed as a spare, or free it."""
        most = lease.spare_slots_min if name == self._class else 0
        if name == STATES and not lease.writes_in_place(0):
            most += 1
        if len(lease.held[name]) < most:
            lease.held[name].append(slot)
        else:
            self._cache.pools[name].unpin(slot)

    def take_back_optional(self, lease: Lease) -> bool:
        """Take back what the lease holds for its checkpoints; return whether there was any.

        If no other lease reads the checkpoint that the next step reads, that step overwrites it
        instead. The second slot of the strategy `double` is freed; it is borrowed when needed, as
        with `lazy`.
        """
        source = lease.source if self._class == STATES else None
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
        while lease.held[self._class]:
            self._cache.pools[self._class].unpin(lease.held[self._class].pop())
        return True

    def _borrow(self, lease: Lease, name: str) -> Any:  # noqa: ANN401  an id of that class
        """Take an object for a checkpoint, or return None: it is optional."""
        if self._cache.could_hold({name: 1}) and not self._fail_allocation(CHECKPOINT_STATE):
            with suppress(OutOfMemory):
                return self._cache.take(name, lease.text.tenant)
        return None

    def _state_inside(self, lease: Lease, flight: StepInFlight, depth: int) -> StateId | None:
        """Take a state for a depth inside a step. For a spare checkpoint only what has less credit is
        evicted."""
        if depth in flight.spare:
            credit = self._spare_credit(lease, depth)
            if not self._cache.free_below(credit, STATES, lease.text.tenant):
                return None
        return self._borrow(lease, STATES)

    def _slot_of_copy(self, lease: Lease, flight: StepInFlight, depth: int) -> CheckpointId | None:
        if depth in flight.spare:
            return self._borrow(lease, CHECKPOINTS) if self.find_spare_slot(lease, depth) else None
        return lease.held[CHECKPOINTS].pop() if self.borrow_slot(lease) else None

    def _take_slots(self, lease: Lease, most: int) -> list[Any]:
        """Return up to `most` slots for states inside its next step. Those of a missing slot are skipped."""
        slots: list[Any] = []
        while len(slots) < most:
            if not self.borrow_slot(lease):
                self._cache.counters["checkpoints_skipped"] += most - len(slots)
                break
            slots.append(lease.held[self._class].pop())
        return slots

    def _take_free_slots(self, lease: Lease, depths: Sequence[int]) -> list[Any]:
        """Return slots for spare checkpoints at the first of `depths`, until there is none for the next."""
        slots: list[Any] = []
        with suppress(OutOfMemory):  # another process may have the memory
            for depth in depths:
                refused = self._fail_allocation(CHECKPOINT_STATE)
                if refused or not self.find_spare_slot(lease, depth):
                    break
                slots.append(self._cache.take(self._class, lease.text.tenant))
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
        entry, converts = self._boundary(lease), self._layout.converts
        in_flight = next((flight for flight in lease.flights if not flight.void), None)
        fetched = converts and in_flight is None and lease.committed not in lease.states
        if not self._layout.hybrid or entry.checkpoint is not None:
            if (last or fetched) and self._layout.hybrid and lease.source is None:
                lease.source = self._cache.pin_checkpoint(entry)
            return True
        continues = in_flight is None and not last and not converts
        if self._layout.has_states and (
            lease.committed not in self._saved(lease) or (continues and not self.borrow_slot(lease))
        ):
            self._cache.counters["checkpoints_skipped"] += 1
            return False
        self._move_state(lease, entry, lease.committed, spare=spare)
        if not converts or last or fetched:
            (in_flight or lease).source = self._cache.pin_checkpoint(entry)
        return True

    def _saved(self, lease: Lease) -> dict[int, Any]:
        """Return the slots that can become checkpoints, by depth."""
        return lease.saved if self._layout.converts else lease.states

    def _move_state(self, lease: Lease, entry: Entry, depth: int, *, spare: bool) -> None:
        """Turn the state of the lease at `depth`, if it has one, and its window there into a checkpoint."""
        held, windows = self._saved(lease), last_window(self._layout, lease, depth)
        saved = (held.pop(depth),) if depth in held else ()
        kept = Checkpoint((), windows, saved) if self._layout.converts else Checkpoint(saved, windows)
        credit = self._spare_credit(lease, depth) if spare else 0.0
        self._cache.keep_checkpoint(entry, kept, spare=spare, credit=credit)

    def _boundary(self, lease: Lease) -> Entry:
        assert lease.committed % self._layout.page_tokens == 0
        assert lease.committed > 0
        return lease.shared_entries[-1]

    def _drop_rolling(self, lease: Lease) -> tuple[Any, ...]:
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
