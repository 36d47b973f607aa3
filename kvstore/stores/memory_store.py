"""A page store inside one process: for tests, the simulator, and workers in one event loop."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.page_store import (
    Got,
    Objects,
    Put,
    StoreCounters,
    StoredObject,
    StoreStats,
    count_fitting,
    full_after,
)
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES, Sealing


class MemoryStore:
    """Bounded by bytes, with LRU eviction. It has no threads, so runs are reproducible.

    objects     seal and body of each object, least recently used first; tests damage them
    """

    def __init__(self, capacity_bytes: int, sealing: Sealing = PLAIN) -> None:
        self.objects: OrderedDict[ObjectKey, bytearray] = OrderedDict()
        self._capacity_bytes = capacity_bytes
        self._sealing = sealing
        self._used_bytes = 0
        self._counters = StoreCounters()

    async def put(self, objects: Objects) -> list[Put]:
        count = count_fitting([SEAL_BYTES + body.nbytes for _, body in objects], self._capacity_bytes)
        for key, _ in objects[:count]:
            if key in self.objects:
                self.objects.move_to_end(key)
        outcomes = [self._store(key, body) for key, body in objects[:count]]
        outcomes += full_after(outcomes, objects)
        self._counters.add_put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Objects) -> list[Got]:
        outcomes = [self._load(key, view) for key, view in wanted]
        self._counters.add_get(wanted, outcomes)
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key in self.objects for key in keys]

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            if key in self.objects:
                self.forget(key)

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            if key in self.objects:
                self.objects.move_to_end(key, last=False)

    async def list_objects(self) -> list[StoredObject]:
        return [StoredObject(key, len(stored)) for key, stored in self.objects.items()]

    def register(self, memory: memoryview) -> None:
        pass

    def patience_s(self, num_bytes: int) -> float:  # noqa: ARG002 - its calls never wait
        return math.inf

    def stats(self) -> StoreStats:
        return self._counters.stats(
            objects=len(self.objects), num_bytes=self._used_bytes, capacity_bytes=self._capacity_bytes
        )

    async def close(self) -> None:
        self.objects.clear()
        self._used_bytes = 0

    def _store(self, key: ObjectKey, body: memoryview) -> Put:
        if key in self.objects:
            return Put.EXISTED
        size = SEAL_BYTES + body.nbytes
        while self._used_bytes + size > self._capacity_bytes:
            self.forget(next(iter(self.objects)))
            self._counters.add_evicted(1)
        stored = bytearray(size)
        stored[:SEAL_BYTES] = self._sealing.seal(key, body)
        stored[SEAL_BYTES:] = body
        self.objects[key] = stored
        self._used_bytes += size
        return Put.STORED

    def _load(self, key: ObjectKey, view: memoryview) -> Got:
        stored = self.objects.get(key)
        if stored is None:
            return Got.MISS
        got = Got.TRUNCATED
        if len(stored) == SEAL_BYTES + view.nbytes:
            view[:] = memoryview(stored)[SEAL_BYTES:]
            got = self._sealing.verify(key, view, stored[:SEAL_BYTES])
        if got is Got.HIT:
            self.objects.move_to_end(key)
        else:
            self.forget(key)
        return got

    def forget(self, key: ObjectKey) -> None:
        self._used_bytes -= len(self.objects.pop(key))
