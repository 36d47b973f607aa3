"""The prefix table: which workers hold which page keys. The definition of the table in placement.cpp.

    key -> slots that hold it          slot -> its keys, the oldest first

A router knows millions of keys, so it uses the compiled table, which takes a tenth of the memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]

FREE = np.uint64(0)
"""No key: the compiled table marks its free positions with it."""

LOG_SLACK = 1024


def cut_keys(keys: Sequence[bytes]) -> Keys:
    """Return the first 8 bytes of each key as a number, which is never `FREE`."""
    packed = b"".join(keys)
    if not set(map(len, keys)) <= {8}:
        packed = b"".join(key[:8].ljust(8, b"\0") for key in keys)
    cut = np.frombuffer(packed, dtype=np.uint64)
    return cut if cut.all() else np.where(cut == FREE, ~FREE, cut)


@dataclass(slots=True, eq=False)
class Chain:
    """The keys of one prompt, in the order of its pages, and their address for compiled code."""

    keys: Keys
    address: int = 0

    def __post_init__(self) -> None:
        self.keys = np.ascontiguousarray(self.keys)
        self.address = self.keys.__array_interface__["data"][0]


@dataclass(slots=True, eq=False)
class _Held:
    """The keys of one slot, the oldest first. `num_added` counts additions since the oldest were
    forgotten, repeated and removed keys included; at `limit` they are forgotten again."""

    keys: dict[int, None] = field(default_factory=dict[int, None])
    num_added: int = 0
    limit: int = LOG_SLACK


class Prefixes:
    """The keys that each slot holds: at most the latest `keys_max` and a quarter more.

    It is soft state. A forgotten key makes placement less accurate, and never affects the tokens of
    an answer.
    """

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}
        self._held: dict[int, _Held] = {}

    def num_held(self, slot: int) -> int:
        return len(self._held[slot].keys) if slot in self._held else 0

    def depths(self, chain: Chain, num_slots: int) -> Slots:
        """Return, for each slot, the depth of the deepest key that it holds: 0 if it holds none."""
        found = np.zeros(num_slots, np.int32)
        for depth, key in enumerate(chain.keys.tolist(), start=1):
            for slot in self._holders.get(key, ()):
                found[slot] = depth
        return found

    def add(self, slot: int, keys: Keys, keys_max: int) -> None:
        """Add keys of a slot. The last ones are forgotten last."""
        if not len(keys):
            return
        held = self._held.setdefault(slot, _Held())
        for key in keys.tolist():
            held.keys.pop(key, None)
            held.keys[key] = None
            self._holders.setdefault(key, set()).add(slot)
        held.num_added += len(keys)
        if held.num_added > min(held.limit, keys_max + keys_max // 4 + LOG_SLACK):
            self._drop(slot, list(held.keys)[: max(0, len(held.keys) - keys_max)])
            held.num_added = len(held.keys)
            held.limit = 2 * len(held.keys) + LOG_SLACK

    def add_chain(self, slot: int, chain: Chain, keys_max: int) -> None:
        """Add the keys of a prompt. The first page is forgotten last."""
        self.add(slot, chain.keys[::-1], keys_max)

    def remove(self, slot: int, keys: Keys) -> None:
        if slot in self._held:
            self._drop(slot, keys.tolist())

    def clear(self, slot: int) -> None:
        self._drop(slot, self.held(slot).tolist())
        self._held.pop(slot, None)

    def held(self, slot: int) -> Keys:
        """Return the keys of a slot, the oldest first."""
        return np.array(list(self._held[slot].keys) if slot in self._held else [], np.uint64)

    def _drop(self, slot: int, keys: Iterable[int]) -> None:
        for key in keys:
            holders = self._holders.get(key, set())
            holders.discard(slot)
            self._held[slot].keys.pop(key, None)
            if not holders:
                self._holders.pop(key, None)
