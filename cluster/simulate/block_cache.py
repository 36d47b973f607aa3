"""The memory of a modelled worker: blocks by key, evicted by least recent use. Pure.

A path is touched from its end to its start, so that a block is evicted before the blocks in front
of it.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def depth_of(
    keys: Sequence[bytes], holds: Callable[[bytes], bool], has_state: Callable[[bytes], bool] | None = None
) -> int:
    """Return how many of the first blocks are held, and with `has_state` only those up to a checkpoint."""
    depth = bisect_left(keys, x=True, key=lambda key: not holds(key))
    while has_state is not None and depth and not has_state(keys[depth - 1]):
        depth -= 1
    return depth


class Stored:
    """An unbounded store of all that any worker has computed."""

    def __init__(self, *, hybrid: bool) -> None:
        self._blocks: set[bytes] = set()
        self._states: set[bytes] = set()
        self._has_state = self._states.__contains__ if hybrid else None

    def put(self, keys: Sequence[bytes], states: Sequence[bytes]) -> None:
        self._blocks.update(keys)
        self._states.update(states)

    def restorable(self, keys: Sequence[bytes]) -> int:
        return depth_of(keys, self._blocks.__contains__, self._has_state)


@dataclass(slots=True)
class BlockChanges:
    """Restorable depths that were added and removed, by the key at their end."""

    added: set[bytes] = field(default_factory=set[bytes])
    removed: set[bytes] = field(default_factory=set[bytes])


class BlockCache:
    """Up to `blocks_max` blocks and `slots_max` checkpoints (None: a model without states)."""

    def __init__(self, blocks_max: int, slots_max: int | None) -> None:
        self.hybrid = slots_max is not None
        self.changes = BlockChanges()
        self._blocks_max = blocks_max
        self._slots_max = slots_max or 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._states: OrderedDict[bytes, None] = OrderedDict()
        self._promised: Counter[bytes] = Counter()
        self._promised_states: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def resident(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks it holds."""
        return depth_of(keys, self._blocks.__contains__)

    def expected(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks it will hold when all promised ones are computed."""
        return depth_of(keys, self._expects)

    def usable(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks need not be computed."""
        return depth_of(keys, self._blocks.__contains__, self._states.__contains__ if self.hybrid else None)

    def expected_usable(self, keys: Sequence[bytes]) -> int:
        """Return the `usable` blocks when all promised ones are computed."""
        return depth_of(keys, self._expects, self._expects_state if self.hybrid else None)

    def promise(self, keys: Sequence[bytes]) -> list[bytes]:
        """Announce the computation of these keys. Return the keys of the checkpoints that it will make. They
        are at the end of the prompt, and where it leaves the known prefix."""
        junction = self.expected(keys)
        self._promised.update(keys)
        states = [keys[depth - 1] for depth in sorted({junction, len(keys)}) if depth] if self.hybrid else []
        self._promised_states.update(states)
        return states

    def redeem(self, keys: Sequence[bytes], states: Sequence[bytes]) -> None:
        """Add promised blocks and checkpoints, which are computed now."""
        for promised, names in ((self._promised, keys), (self._promised_states, states)):
            promised.subtract(names)
            for name in names:
                if not promised[name]:
                    del promised[name]
        for key in reversed(keys):
            if key not in self._blocks and not self.hybrid:
                self._record_added(key)
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        for key in states:
            if key not in self._states:
                self._record_added(key)
            self._states[key] = None
            self._states.move_to_end(key)
        self._evict()

    def touch(self, keys: Sequence[bytes], depth: int) -> None:
        """Mark the first `depth` blocks as used by a prompt that resumes there."""
        for key in reversed(keys[:depth]):
            self._blocks.move_to_end(key)
        if self.hybrid and depth:
            self._states.move_to_end(keys[depth - 1])

    def restorable(self) -> list[bytes]:
        return list(self._states if self.hybrid else self._blocks)

    def take_changes(self) -> BlockChanges:
        changes, self.changes = self.changes, BlockChanges()
        return changes

    def _expects(self, key: bytes) -> bool:
        return key in self._blocks or self._promised[key] > 0

    def _expects_state(self, key: bytes) -> bool:
        return key in self._states or self._promised_states[key] > 0

    def _evict(self) -> None:
        while len(self._blocks) > self._blocks_max:
            key, _ = self._blocks.popitem(last=False)
            if not self.hybrid or key in self._states:
                self._record_removed(key)
            self._states.pop(key, None)
        while len(self._states) > self._slots_max:
            self._record_removed(self._states.popitem(last=False)[0])

    def _record_added(self, key: bytes) -> None:
        self.changes.added.add(key)
        self.changes.removed.discard(key)

    def _record_removed(self, key: bytes) -> None:
        if key in self.changes.added:
            self.changes.added.discard(key)
        else:
            self.changes.removed.add(key)
