"""The latest evictions of one worker, by key: why a depth is gone that a prompt could have resumed at."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from tidemill.kvstore.keys import PageKey

EVICTIONS_MAX = 1 << 14
"""The evictions that are remembered, in about 3 MB."""


class Evicted(NamedTuple):
    """An eviction for memory that a request of `tenant` needed. `reason` is the class of objects, or as in
    the names of counters. `expired`: a client had asked to retain the object, and that time was over."""

    reason: str
    at_s: float
    tenant: str
    expired: bool


class Evictions:
    """A ring of evictions: adding one to a full ring drops the oldest."""

    def __init__(self, size: int = EVICTIONS_MAX) -> None:
        self._size = size
        self._of: OrderedDict[PageKey, Evicted] = OrderedDict()

    def add(self, key: PageKey, evicted: Evicted) -> None:
        self._of[key] = evicted
        self._of.move_to_end(key)
        if len(self._of) > self._size:
            self._of.popitem(last=False)

    def deepest(self, keys: Sequence[PageKey], start: int) -> tuple[int, Evicted] | None:
        """Return the deepest depth above `start` pages along `keys` that was evicted, in pages."""
        if not self._of:
            return None
        depths = range(len(keys), start, -1)
        found = map(self._of.__contains__, reversed(keys[start:]))
        depth = next(compress(depths, found), None)
        return None if depth is None else (depth, self._of[keys[depth - 1]])
