"""The prefix table: maps cut keys to the workers that hold them, in a few dozen bytes per page.

    key -> one slot, or the number of a holder set          holder set -> two or more slots

It uses open addressing over numpy arrays, because a router knows millions of keys and a dict of
sets takes ten times the memory. The pages of one prefix share a holder set, so that the look-up of
a chain of keys takes one operation per holder set on it. All operations work on batches.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]

NO_HOLDER = -1
"""The value of a key without a holder. Holder set `n` is written as `-2 - n`."""

FREE = np.uint64(0)
POSITIONS_MIN = 1 << 10
FILL_MAX = 0.7
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing (Knuth, TAOCP 3, 6.4)
LOG_SLACK = 1024
RUNS_MAX = 16
"""More runs of equal values than a prompt has are sorted by value first."""

WINDOW = np.arange(8)  # positions that one probe reads


def cut_keys(keys: Sequence[bytes]) -> Keys:
    """Return the first 8 bytes of each key as a number, which is never `FREE`."""
    packed = b"".join(keys)
    if not set(map(len, keys)) <= {8}:
        packed = b"".join(key[:8].ljust(8, b"\0") for key in keys)
    cut = np.frombuffer(packed, dtype=np.uint64)
    return cut if cut.all() else np.where(cut == FREE, ~FREE, cut)


@dataclass(slots=True, eq=False)
class Chain:
    """The keys of one prompt, in the order of its pages. It is looked up once and booked on two workers: the
    positions of its keys are kept until the table changes."""

    keys: Keys
    positions: Positions = field(default_factory=lambda: np.zeros(0, np.int64))  # negative: missing
    version: int = -1  # of the table
    address: int = 0  # of the keys, for compiled code

    def __post_init__(self) -> None:
        self.keys = np.ascontiguousarray(self.keys)
        self.address = self.keys.__array_interface__["data"][0]


@dataclass(slots=True, eq=False)
class _Log:
    """The keys of one worker in the order of announcement, including some that it lost."""

    parts: list[Keys] = field(default_factory=list[Keys])
    num_keys: int = 0
    num_held: int = 0
    limit: int = LOG_SLACK  # the number of keys at which it is compacted

    def append(self, keys: Keys) -> None:
        self.parts.append(keys)
        self.num_keys += len(keys)


class Prefixes:
    """The keys that each worker holds: at most the latest `keys_max` and a quarter more.

    It is soft state. A forgotten key makes placement less accurate, and never affects the tokens of
    an answer.
    """

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(POSITIONS_MIN, np.uint64)
        self._values: Slots = np.full(POSITIONS_MIN, NO_HOLDER, np.int32)
        self._used = 0  # positions whose key is not FREE, with a holder or not
        self._version = 0  # changes when a key moves
        self._holder_sets = HolderSets()
        self._logs: dict[int, _Log] = {}

    def num_held(self, slot: int) -> int:
        log = self._logs.get(slot)
        return 0 if log is None else log.num_held

    @property
    def num_bytes(self) -> int:
        """The size of the arrays, without the holder sets, which are few."""
        logs = sum(part.nbytes for log in self._logs.values() for part in log.parts)
        return self._keys.nbytes + self._values.nbytes + logs

    def depths(self, chain: Chain, num_slots: int) -> Slots:
        """Return, for each slot, the depth of the deepest key that it holds: 0 if it holds none."""
        found = np.zeros(num_slots, np.int32)
        if not len(chain.keys):
            return found
        positions = self._locate(chain)
        values = np.where(positions < 0, NO_HOLDER, self._values[positions])
        (alone,) = np.nonzero(values >= 0)
        found[values[alone]] = alone + 1  # for a repeated index numpy keeps the last value
        (shared,) = np.nonzero(values < NO_HOLDER)
        deepest = dict(zip(values[shared].tolist(), (shared + 1).tolist(), strict=True))
        for value, depth in deepest.items():
            slots = list(self._holder_sets.slots(value))
            found[slots] = np.maximum(found[slots], depth)
        return found

    def add(self, slot: int, keys: Keys, keys_max: int) -> None:
        """Add keys of a worker. The last ones are forgotten last."""
        if len(keys):
            distinct = np.unique(keys)
            self._grow(len(distinct))
            self._hold(slot, keys.copy(), self._insert(distinct), keys_max)

    def add_chain(self, slot: int, chain: Chain, keys_max: int) -> None:
        """Add the keys of a prompt. The first page is forgotten last."""
        if len(set(chain.keys.tolist())) < len(chain.keys) or not len(chain.keys):
            self.add(slot, chain.keys[::-1], keys_max)
            return
        self._grow(len(chain.keys))
        positions = self._locate(chain)
        (missing,) = np.nonzero(positions < 0)
        if len(missing):
            positions[missing] = self._claim(chain.keys[missing], ~positions[missing])
            self._version = chain.version = self._version + 1
        self._hold(slot, chain.keys[::-1].copy(), positions, keys_max)

    def _hold(self, slot: int, keys: Keys, positions: Positions, keys_max: int) -> None:
        """Record keys of a worker; `positions` has the position of each distinct one."""
        log = self._logs.setdefault(slot, _Log())
        log.append(keys)
        log.num_held += self._change(positions, slot, joins=True)
        if log.num_keys > min(log.limit, keys_max + keys_max // 4 + LOG_SLACK):
            self._compact(slot, log, keys_max)

    def remove(self, slot: int, keys: Keys) -> None:
        log = self._logs.get(slot)
        if log is None or not len(keys):
            return
        positions = self._find(np.unique(keys))
        log.num_held += self._change(positions[positions >= 0], slot, joins=False)

    def clear(self, slot: int) -> None:
        """Remove all keys of a worker."""
        log = self._logs.get(slot)
        if log is not None:
            self.remove(slot, np.concatenate(log.parts))
            assert log.num_held == 0
            del self._logs[slot]

    def held(self, slot: int) -> Keys:
        """Return the keys of a worker, the oldest first."""
        log = self._logs.get(slot)
        if log is None:
            return np.zeros(0, np.uint64)
        latest = _latest(np.concatenate(log.parts))
        positions = self._find(latest)
        values = np.where(positions < 0, NO_HOLDER, self._values[positions])
        holds = [value for value in np.unique(values).tolist() if slot in self._holder_sets.slots(value)]
        return latest[np.isin(values, holds)]

    def _compact(self, slot: int, log: _Log, keys_max: int) -> None:
        """Drop lost keys of a worker from its log, and forget the oldest of the rest."""
        held = self.held(slot)
        first = max(0, len(held) - keys_max)
        self.remove(slot, held[:first])
        kept = held[first:].copy()
        log.parts, log.num_keys, log.num_held = [kept], len(kept), len(kept)
        log.limit = 2 * len(kept) + LOG_SLACK

    def _change(self, positions: Positions, slot: int, *, joins: bool) -> int:
        """Add the slot to the holders of keys, or remove it. Return the change of its key count."""
        if not len(positions):
            return 0
        values = self._values[positions]
        edges = np.flatnonzero(values[1:] != values[:-1])
        if len(edges) > RUNS_MAX:
            order = np.argsort(values)
            positions, values = positions[order], values[order]
            edges = np.flatnonzero(values[1:] != values[:-1])
        change = 0
        for first, end in pairwise([0, *(edges + 1).tolist(), len(values)]):
            value = int(values[first])
            if (slot in self._holder_sets.slots(value)) != joins:
                after = self._holder_sets.move(value, slot, joins=joins, num_keys=end - first)
                self._values[positions[first:end]] = after
                change += end - first
        return change if joins else -change

    def _locate(self, chain: Chain) -> Positions:
        if chain.version != self._version:
            chain.positions, chain.version = self._find(chain.keys), self._version
        return chain.positions

    def _home(self, keys: Keys) -> Positions:
        shift = np.uint64(65 - len(self._keys).bit_length())
        return ((keys * SPREAD) >> shift).astype(np.int64)

    def _find(self, keys: Keys) -> Positions:
        """Return the position of each key; for a missing one, the inverted free one for it."""
        homes = self._home(keys)
        there = self._keys[homes]
        positions = np.where(there == keys, homes, ~homes)  # most searches end at the home position
        (searching,) = np.nonzero((there != keys) & (there != FREE))
        windows = homes[searching, None] + 1 + WINDOW
        while len(searching):
            at, ends, there = self._probe(keys[searching], windows)
            at = np.where(there == FREE, ~at, at)
            positions[searching[ends]] = at[ends]
            searching, windows = searching[~ends], windows[~ends] + len(WINDOW)
        return positions

    def _claim(self, keys: Keys, free: Positions) -> Positions:
        """Insert distinct keys, each at the free position of its search. Return the positions."""
        self._keys[free] = keys  # of several keys for one position one is inserted
        has = self._keys[free] == keys
        self._used += int(np.count_nonzero(has))
        positions = free.copy()
        if not has.all():
            positions[~has] = self._insert(keys[~has])
        return positions

    def _insert(self, keys: Keys) -> Positions:
        """Insert the distinct keys that are missing. Return the positions of all."""
        self._version += 1
        positions = np.empty(len(keys), np.int64)
        searching, windows = np.arange(len(keys)), self._home(keys)[:, None] + WINDOW
        while len(searching):
            wanted = keys[searching]
            at, ends, there = self._probe(wanted, windows)
            free = ends & (there == FREE)
            self._keys[at[free]] = wanted[free]  # of several keys for one position one is inserted
            done = ends & (self._keys[at] == wanted)
            self._used += int(np.count_nonzero(done & free))
            positions[searching[done]] = at[done]
            windows[~ends] += len(WINDOW)
            searching, windows = searching[~done], windows[~done]
        return positions

    def _probe(self, keys: Keys, windows: Positions) -> tuple[Positions, npt.NDArray[np.bool_], Keys]:
        """Find the first position in each window [N, 8] that has the key or is free.

        Return these positions, whether there is one, and their keys. No key is behind a free
        position, because no key is ever removed.
        """
        at = windows & (len(self._keys) - 1)
        there = self._keys[at]
        ends = (there == keys[:, None]) | (there == FREE)
        each, first = np.arange(len(keys)), ends.argmax(axis=1)
        return at[each, first], ends[each, first], there[each, first]

    def _grow(self, num_keys: int) -> None:
        """Make room for `num_keys` more, and drop the keys without a holder."""
        if self._used + num_keys <= FILL_MAX * len(self._keys):
            return
        (held,) = np.nonzero(self._values != NO_HOLDER)
        keys, values = self._keys[held], self._values[held]
        num_positions = POSITIONS_MIN
        while 0.75 * FILL_MAX * num_positions < len(keys) + num_keys:  # with room for a third more
            num_positions *= 2
        self._keys = np.zeros(num_positions, np.uint64)
        self._values = np.full(num_positions, NO_HOLDER, np.int32)
        self._used = 0
        self._values[self._insert(keys)] = values


class HolderSets:
    """Sets of at least two slots, each stored once, with the number of keys that they hold."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, ...], int] = {}
        self._slots: dict[int, tuple[int, ...]] = {}
        self._num_keys: dict[int, int] = {}
        self._vacant: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, value: int) -> tuple[int, ...]:
        """Return the holders that a value stands for, ascending: none, one slot, or a set."""
        if value < NO_HOLDER:
            return self._slots[value]
        return (value,) if value >= 0 else ()

    def move(self, value: int, slot: int, *, joins: bool, num_keys: int) -> int:
        """Add `slot` to the holders of `num_keys` keys, or remove it. Return their new value."""
        after = list(self.slots(value))
        if joins:
            insort(after, slot)
        else:
            after.remove(slot)
        self._count(value, -num_keys)
        match after:
            case []:
                return NO_HOLDER
            case [alone]:
                return alone
            case _:
                return self._set_value(tuple(after), num_keys)

    def _set_value(self, slots: tuple[int, ...], num_keys: int) -> int:
        value = self._values.get(slots)
        if value is None:
            value = self._vacant.pop() if self._vacant else NO_HOLDER - 1 - len(self._slots)
            self._values[slots] = value
            self._slots[value] = slots
            self._num_keys[value] = 0
        self._num_keys[value] += num_keys
        return value

    def _count(self, value: int, change: int) -> None:
        if value >= NO_HOLDER:
            return
        self._num_keys[value] += change
        if not self._num_keys[value]:
            del self._num_keys[value]
            del self._values[self._slots.pop(value)]
            self._vacant.append(value)


def _latest(keys: Keys) -> Keys:
    """Return each key once, at its last occurrence."""
    _, first = np.unique(keys[::-1], return_index=True)
    return keys[np.sort(len(keys) - 1 - first)]
