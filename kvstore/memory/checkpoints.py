"""Which states and windows become checkpoints, and the slots that a lease goes on in when they do.

A checkpoint is made without a copy: the slot that holds the state at a page boundary goes to the index, the
next step reads it there and writes to another slot; the last window is shared between lease and index.
"""

from collections.abc import Callable
from contextlib import suppress

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import StateId
from tidemill.kvstore.memory.allocation_sites import AllocationSite
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.prefix_index import Checkpoint, Entry
from tidemill.kvstore.memory.windows import last_window


class Checkpoints:
    """Of leases over one cache."""

    def __init__(
        self, cache: Cache, per_path: int, fail_allocation: Callable[[AllocationSite], bool]
    ) -> None:
        self._cache = cache
        self._layout = cache.layout
        self._per_path = per_path
        self._fail_allocation = fail_allocation

    def keep(self, lease: Lease, *, last: bool = False) -> bool:
        """The state at `committed`, a page boundary, becomes the checkpoint there, unless there is one. The
        next step reads it there and writes to another slot; with `last` there is no next step.

        Cache memory is optional: False when no second slot is free, or when the step in flight overwrites the
        state. The lease then keeps what it has.
        """
        kept = self._keep(lease, last=last)
        if kept:
            self._thin(lease)
        return kept

    def roll(self, lease: Lease) -> bool:
        """Keep the state at `committed`, a page boundary reached while decoding, in place of the one kept
        before. When no second slot can be had the earlier one stays: False, try again at the next one."""
        entry = self._boundary(lease)
        if not self._layout.hybrid or entry.checkpoint is not None:
            return True
        if not self._keep(lease, last=False):
            return False
        for slot in self._drop_rolling(lease):
            self.return_slot(lease, slot)
        lease.rolling = entry
        self._thin(lease)
        return True

    def borrow(self, lease: Lease) -> bool:
        """Whether the lease has a slot to go on in, if need be one that it did not have: the slot of the
        checkpoint that the new one replaces, before another one's."""
        if not lease.spare_slots and not self._cache.state_is_free():
            lease.spare_slots += self._drop_rolling(lease)
        if not lease.spare_slots and not self._fail_allocation(AllocationSite.CHECKPOINT_STATE):
            with suppress(OutOfMemory):
                lease.spare_slots.append(self._cache.take_state())
        return bool(lease.spare_slots)

    def return_slot(self, lease: Lease, slot: StateId) -> None:
        """A slot that is not needed any more is the next spare, or free."""
        if len(lease.spare_slots) < lease.spare_slots_min + (not lease.writes_in_place(0)):
            lease.spare_slots.append(slot)
        else:
            self._cache.free_state(slot)

    def _keep(self, lease: Lease, *, last: bool) -> bool:
        entry = self._boundary(lease)
        if not self._layout.hybrid or entry.checkpoint is not None:
            if last and self._layout.hybrid and lease.source is None:
                lease.source = self._cache.pin_checkpoint(entry)
            return True
        in_flight = next((flight for flight in lease.flights if not flight.void), None)
        goes_on = in_flight is None and not last
        if self._layout.has_states and (
            lease.committed not in lease.states or (goes_on and not self.borrow(lease))
        ):
            self._cache.counters["checkpoints_skipped"] += 1
            return False
        state = lease.states.pop(lease.committed, None)
        self._cache.keep_checkpoint(entry, Checkpoint(state, last_window(self._layout, lease)))
        (in_flight or lease).source = self._cache.pin_checkpoint(entry)
        return True

    def _boundary(self, lease: Lease) -> Entry:
        assert lease.committed % self._layout.page_tokens == 0
        assert lease.committed > 0
        return lease.shared_entries[-1]

    def _drop_rolling(self, lease: Lease) -> list[StateId]:
        """The slot of the checkpoint kept before, if nobody reads it; the lease owns it now."""
        earlier = lease.rolling
        if earlier is None or earlier.checkpoint is None or earlier.checkpoint_pins:
            return []
        lease.rolling = None
        slot = self._cache.reclaim_checkpoint(earlier)
        return [] if slot is None else [slot]

    def _thin(self, lease: Lease) -> None:
        """Hold the checkpoints on the path of the lease to their number; junctions stay longest."""
        above = list(self._cache.index.checkpoints_above(lease.shared_entries[-1]))
        surplus = len(above) + 1 - self._per_path
        loose = [entry for entry in above if not entry.checkpoint_pins]
        loose.sort(key=lambda entry: (len(entry.children) > 1, entry.score))
        for entry in loose[: max(0, surplus)]:
            self._cache.drop_checkpoint(entry, "cap")
