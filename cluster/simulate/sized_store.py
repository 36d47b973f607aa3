"""A page store that holds only names, and takes the transfer time of the bytes."""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from tidemill.kvstore.keys import Kind, ObjectKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.page_store import Got, Put, StoredObject, StoreStats


class SizeOnlyStore:
    """The objects that all workers share, evicted by least recent use."""

    def __init__(self, layout: Layout, capacity_bytes: int) -> None:
        self._sizes = {
            Kind.PAGE: layout.page_bytes,
            Kind.WINDOW: layout.window_bytes,
            Kind.CHECKPOINT: layout.saved_bytes,
        }
        self._capacity_bytes = capacity_bytes
        self._objects: OrderedDict[ObjectKey, None] = OrderedDict()
        self._used_bytes = 0

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._objects

    def size(self, key: ObjectKey) -> int:
        return self._sizes[key.kind]

    def add(self, key: ObjectKey) -> Put:
        if key in self._objects:
            self._objects.move_to_end(key)
            return Put.EXISTED
        if self.size(key) > self._capacity_bytes:
            return Put.FULL
        self._objects[key] = None
        self._used_bytes += self.size(key)
        while self._used_bytes > self._capacity_bytes:
            self._used_bytes -= self.size(self._objects.popitem(last=False)[0])
        return Put.STORED

    def touch(self, key: ObjectKey) -> Got:
        if key not in self._objects:
            return Got.MISS
        self._objects.move_to_end(key)
        return Got.HIT

    def remove(self, key: ObjectKey) -> None:
        if key in self._objects:
            del self._objects[key]
            self._used_bytes -= self.size(key)

    def demote(self, key: ObjectKey) -> None:
        if key in self._objects:
            self._objects.move_to_end(key, last=False)

    def stats(self) -> StoreStats:
        return StoreStats(
            objects=len(self._objects),
            bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes,
            free_bytes=self._capacity_bytes - self._used_bytes,
        )

    def list_objects(self) -> list[StoredObject]:
        return [StoredObject(key, self.size(key)) for key in self._objects]


class StoreLink:
    """The PageStore of one worker: a link to the shared store. Gets run one after the other at `bytes_per_s`,
    and so do puts."""

    def __init__(self, store: SizeOnlyStore, bytes_per_s: float) -> None:
        self._store = store
        self._bytes_per_s = bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._free_at_s = {Put: 0.0, Got: 0.0}
        self._put = Counter[Put]()
        self._got = Counter[Got]()
        self._put_bytes = 0
        self._get_bytes = 0

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        num_bytes = sum(self._store.size(key) for key, _ in objects if key not in self._store)
        await self._move(Put, num_bytes)
        outcomes = [self._store.add(key) for key, _ in objects]
        if Put.FULL in outcomes:
            first = outcomes.index(Put.FULL) + 1
            outcomes[first:] = [Put.SKIPPED] * (len(outcomes) - first)
        self._put.update(outcomes)
        self._put_bytes += num_bytes
        return outcomes

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        outcomes = [self._store.touch(key) for key, _ in wanted]
        hits = zip(wanted, outcomes, strict=True)
        num_bytes = sum(self._store.size(key) for (key, _), outcome in hits if outcome is Got.HIT)
        await self._move(Got, num_bytes)
        self._got.update(outcomes)
        self._get_bytes += num_bytes
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key in self._store for key in keys]

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._store.remove(key)

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._store.demote(key)

    async def list_objects(self) -> list[StoredObject]:
        return self._store.list_objects()

    def register(self, memory: memoryview) -> None:
        pass

    def patience_s(self, num_bytes: int) -> float:  # noqa: ARG002  it always answers
        return math.inf

    def stats(self) -> StoreStats:
        return replace(
            self._store.stats(),
            put=self._put,
            got=self._got,
            put_bytes=self._put_bytes,
            get_bytes=self._get_bytes,
        )

    async def close(self) -> None:
        pass

    async def _move(self, direction: type[Put] | type[Got], num_bytes: int) -> None:
        if not num_bytes:
            return
        now_s = self._loop.time()
        end_s = max(now_s, self._free_at_s[direction]) + num_bytes / self._bytes_per_s
        self._free_at_s[direction] = end_s
        await asyncio.sleep(end_s - now_s)
