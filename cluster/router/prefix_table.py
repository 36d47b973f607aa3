"""The workers that hold each depth: a table from cut keys to sets of workers, in a few dozen bytes a page.

    key -> one slot, or the number of a crowd          crowd -> the slots of all that hold the key

It uses open addressing over numpy arrays, because a router knows millions of keys and a dict of sets takes
ten times the memory.
Pages of one prefix have the same crowd, so a chain of keys is answered with one operation per crowd on it.
All operations are on batches.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

NOBODY = -1
"""The value of a key without a holder. Crowd `c` is written as `-2 - c`."""

FREE = np.uint64(0)
LEAST_PLACES = 1 << 10
FILL_MAX = 0.7
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing (Knuth, TAOCP 3, 6.4)
LOG_SLACK = 1024
RUNS_MAX = 16
"""Pages of a prompt have few crowds between them; keys in any order are sorted by theirs."""

WINDOW = np.arange(8)  # slots examined together


def cut_keys(keys: Sequence[bytes]) -> Keys:
    """Return the first 8 bytes of each key, as numbers; none is `FREE`."""
    packed = b"".join(keys)
    if not set(map(len, keys)) <= {8}:
        packed = b"".join(key[:8].ljust(8, b"\0") for key in keys)
    cut = np.frombuffer(packed, dtype=np.uint64)
    return np.where(cut == FREE, ~FREE, cut)


@dataclass(slots=True, eq=False)
class Chain:
    """The keys of one prompt, the first page's first.
    It is looked up once and booked on two workers, so the positions of its keys are kept until the table
    changes.
    """

    keys: Keys
    places: Places = field(default_factory=lambda: np.zeros(0, np.int64))  # negative: the key is absent
    version: int = -1  # of the table
    repeats: bool = False  # whether some key occurs twice

    def __post_init__(self) -> None:
        self.repeats = len(set(self.keys.tolist())) < len(self.keys)


@dataclass(slots=True, eq=False)
class _Log:
    """The keys of one worker in the order of their announcement, with some that it lost since."""

    parts: list[Keys] = field(default_factory=list[Keys])
    num_keys: int = 0
    num_held: int = 0
    limit: int = LOG_SLACK  # the length at which it is tidied

    def append(self, keys: Keys) -> None:
        self.parts.append(keys)
        self.num_keys += len(keys)


class Prefixes:
    """A soft and bounded table: for each worker the latest `keys_max` keys, and up to a quarter more.

    A forgotten key costs a wrong guess about a worker and never a token.
    """

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(LEAST_PLACES, np.uint64)
        self._values: Slots = np.full(LEAST_PLACES, NOBODY, np.int32)
        self._used = 0  # slots whose key is not FREE, held or not
        self._version = 0  # another version: some key has moved
        self._crowds = Crowds()
        self._logs: dict[int, _Log] = {}

    def num_held(self, slot: int) -> int:
        log = self._logs.get(slot)
        return 0 if log is None else log.num_held

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the arrays, without the few crowds."""
        logs = sum(part.nbytes for log in self._logs.values() for part in log.parts)
        return self._keys.nbytes + self._values.nbytes + logs

    def depths(self, chain: Chain, num_slots: int) -> Slots:
        """Return for each slot the number of keys up to the deepest that it holds; 0 if it holds none."""
        found = np.zeros(num_slots, np.int32)
        if not len(chain.keys):
            return found
        places = self._located(chain)
        values = np.where(places < 0, NOBODY, self._values[places])
        (alone,) = np.nonzero(values >= 0)
        found[values[alone]] = alone + 1  # of several values for an element the last one stays
        (crowded,) = np.nonzero(values < NOBODY)
        deepest = dict(zip(values[crowded].tolist(), (crowded + 1).tolist(), strict=True))
        for value, depth in deepest.items():
            slots = list(self._crowds.slots(value))
            found[slots] = np.maximum(found[slots], depth)
        return found

    def add(self, slot: int, keys: Keys, keys_max: int) -> None:
        """Record that the worker holds these keys; the last ones are forgotten last."""
        if len(keys):
            distinct = np.unique(keys)
            self._grow(len(distinct))
            self._hold(slot, keys.copy(), self._insert(distinct), keys_max)

    def add_chain(self, slot: int, chain: Chain, keys_max: int) -> None:
        """Record that the worker holds the chain's keys; the first page is forgotten last."""
        if chain.repeats or not len(chain.keys):
            self.add(slot, chain.keys[::-1], keys_max)
            return
        self._grow(len(chain.keys))
        places = self._located(chain)
        (missing,) = np.nonzero(places < 0)
        if len(missing):
            places[missing] = self._take(chain.keys[missing], ~places[missing])
            self._version = chain.version = self._version + 1
        self._hold(slot, chain.keys[::-1].copy(), places, keys_max)

    def _hold(self, slot: int, keys: Keys, places: Places, keys_max: int) -> None:
        """Record the holder; `places` are the positions of the keys, each once."""
        log = self._logs.setdefault(slot, _Log())
        log.append(keys)
        log.num_held += self._change(places, slot, joins=True)
        if log.num_keys > min(log.limit, keys_max + keys_max // 4 + LOG_SLACK):
            self._tidy(slot, log, keys_max)

    def remove(self, slot: int, keys: Keys) -> None:
        log = self._logs.get(slot)
        if log is None or not len(keys):
            return
        places = self._find(np.unique(keys))
        log.num_held += self._change(places[places >= 0], slot, joins=False)

    def clear(self, slot: int) -> None:
        """Forget a worker that is lost, or that announces everything again."""
        log = self._logs.get(slot)
        if log is not None:
            self.remove(slot, np.concatenate(log.parts))
            assert log.num_held == 0
            del self._logs[slot]

    def held(self, slot: int) -> Keys:
        """Return the worker's keys, the oldest first."""
        log = self._logs.get(slot)
        if log is None:
            return np.zeros(0, np.uint64)
        latest = _latest(np.concatenate(log.parts))
        places = self._find(latest)
        values = np.where(places < 0, NOBODY, self._values[places])
        holds = [value for value in np.unique(values).tolist() if slot in self._crowds.slots(value)]
        return latest[np.isin(values, holds)]

    def _tidy(self, slot: int, log: _Log, keys_max: int) -> None:
        """Drop from the log what the worker no longer holds, and forget the oldest of the rest."""
        held = self.held(slot)
        first = max(0, len(held) - keys_max)
        self.remove(slot, held[:first])
        kept = held[first:].copy()
        log.parts, log.num_keys, log.num_held = [kept], len(kept), len(kept)
        log.limit = 2 * len(kept) + LOG_SLACK

    def _change(self, places: Places, slot: int, *, joins: bool) -> int:
        """Add the slot to the holders of the keys at `places`, or remove it; return its change in keys."""
        if not len(places):
            return 0
        values = self._values[places]
        edges = np.flatnonzero(values[1:] != values[:-1])
        if len(edges) > RUNS_MAX:
            order = np.argsort(values)
            places, values = places[order], values[order]
            edges = np.flatnonzero(values[1:] != values[:-1])
        change = 0
        for first, end in pairwise([0, *(edges + 1).tolist(), len(values)]):
            value = int(values[first])
            if (slot in self._crowds.slots(value)) != joins:
                after = self._crowds.moved(value, slot, joins=joins, num_keys=end - first)
                self._values[places[first:end]] = after
                change += end - first
        return change if joins else -change

    def _located(self, chain: Chain) -> Places:
        if chain.version != self._version:
            chain.places, chain.version = self._find(chain.keys), self._version
        return chain.places

    def _home(self, keys: Keys) -> Places:
        shift = np.uint64(65 - len(self._keys).bit_length())
        return ((keys * SPREAD) >> shift).astype(np.int64)

    def _find(self, keys: Keys) -> Places:
        """Return the position of each key; for an absent key, the inverted position of the free slot where
        its search ended.
        """
        homes = self._home(keys)
        there = self._keys[homes]
        places = np.where(there == keys, homes, ~homes)  # most searches end at their first slot
        (searching,) = np.nonzero((there != keys) & (there != FREE))
        windows = homes[searching, None] + 1 + WINDOW
        while len(searching):
            at, ends, there = self._look(keys[searching], windows)
            at = np.where(there == FREE, ~at, at)
            places[searching[ends]] = at[ends]
            searching, windows = searching[~ends], windows[~ends] + len(WINDOW)
        return places

    def _take(self, keys: Keys, free: Places) -> Places:
        """Put each of the distinct keys into the free slot where its search ended; return their positions."""
        self._keys[free] = keys  # of keys that want the same slot one gets it
        has = self._keys[free] == keys
        self._used += int(np.count_nonzero(has))
        places = free.copy()
        if not has.all():
            places[~has] = self._insert(keys[~has])
        return places

    def _insert(self, keys: Keys) -> Places:
        """Return the position of each of the distinct keys, inserting absent ones."""
        self._version += 1
        places = np.empty(len(keys), np.int64)
        searching, windows = np.arange(len(keys)), self._home(keys)[:, None] + WINDOW
        while len(searching):
            wanted = keys[searching]
            at, ends, there = self._look(wanted, windows)
            free = ends & (there == FREE)
            self._keys[at[free]] = wanted[free]  # of keys that want the same slot one gets it
            done = ends & (self._keys[at] == wanted)
            self._used += int(np.count_nonzero(done & free))
            places[searching[done]] = at[done]
            windows[~ends] += len(WINDOW)
            searching, windows = searching[~done], windows[~done]
        return places

    def _look(self, keys: Keys, windows: Places) -> tuple[Places, npt.NDArray[np.bool_], Keys]:
        """Return the first slot in each window [N, 8] that has the key or is free, whether there is one,
        and its key.
        No key is further away than a free slot, because keys are never removed.
        """
        at = windows & (len(self._keys) - 1)
        there = self._keys[at]
        ends = (there == keys[:, None]) | (there == FREE)
        each, first = np.arange(len(keys)), ends.argmax(axis=1)
        return at[each, first], ends[each, first], there[each, first]

    def _grow(self, num_keys: int) -> None:
        """Make room for `num_keys` more, and drop keys without holders."""
        if self._used + num_keys <= FILL_MAX * len(self._keys):
            return
        (held,) = np.nonzero(self._values != NOBODY)
        keys, values = self._keys[held], self._values[held]
        num_places = LEAST_PLACES
        while 0.75 * FILL_MAX * num_places < len(keys) + num_keys:  # a third more may follow
            num_places *= 2
        self._keys = np.zeros(num_places, np.uint64)
        self._values = np.full(num_places, NOBODY, np.int32)
        self._used = 0
        self._values[self._insert(keys)] = values


class Crowds:
    """Sets of at least two slots, each stored once, with the number of keys that they hold together."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, ...], int] = {}
        self._slots: dict[int, tuple[int, ...]] = {}
        self._num_keys: dict[int, int] = {}
        self._vacant: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, value: int) -> tuple[int, ...]:
        """Return the slots of any value, ascending: of none, of one holder, or of a crowd."""
        if value < NOBODY:
            return self._slots[value]
        return (value,) if value >= 0 else ()

    def moved(self, value: int, slot: int, *, joins: bool, num_keys: int) -> int:
        """Return the new value of `num_keys` keys with `value` when `slot` joins or leaves their holders."""
        after = list(self.slots(value))
        if joins:
            insort(after, slot)
        else:
            after.remove(slot)
        self._count(value, -num_keys)
        match after:
            case []:
                return NOBODY
            case [alone]:
                return alone
            case _:
                return self._crowd(tuple(after), num_keys)

    def _crowd(self, slots: tuple[int, ...], num_keys: int) -> int:
        value = self._values.get(slots)
        if value is None:
            value = self._vacant.pop() if self._vacant else NOBODY - 1 - len(self._slots)
            self._values[slots] = value
            self._slots[value] = slots
            self._num_keys[value] = 0
        self._num_keys[value] += num_keys
        return value

    def _count(self, value: int, change: int) -> None:
        if value >= NOBODY:
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
