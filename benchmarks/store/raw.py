"""Ways to move the same objects: through a page store, or raw through the library alone."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from tests.support.mooncake import Mooncake, PlainClient

from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.page_store import Got, PageStore, Put

FILL_BYTES = 16 << 20
FILL_SHARE = 0.85
"""The master evicts above a usage of 0.9."""

Sized = Sequence[tuple[Kind, int]]
"""The kind and size of each object of a call."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The source and target of objects, touched in advance to avoid page faults."""

    source: np.ndarray
    target: np.ndarray

    @classmethod
    def of(cls, num_bytes: int) -> "Memory":
        source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        return cls(source, np.zeros_like(source))

    def calls(self, sized: Sequence[Sized], rng: Random) -> list["Call"]:
        """Return a call for each element of `sized`, with new keys and adjacent bytes."""
        made, start = [], 0
        for sizes in sized:
            made.append(self._call(sizes, start, rng))
            start += sum(made[-1].sizes)
        return made

    def arrived(self, calls: Sequence["Call"]) -> bool:
        """Return whether the target has the bytes of these calls."""
        end = sum(num_bytes for call in calls for num_bytes in call.sizes)
        return np.array_equal(self.source[:end], self.target[:end])

    def _call(self, sized: Sized, start: int, rng: Random) -> "Call":
        keys = [ObjectKey(kind, PageKey(rng.randbytes(DIGEST_BYTES))) for kind, _ in sized]
        cuts = list(accumulate((num_bytes for _, num_bytes in sized), initial=start))
        spans = [slice(*span) for span in pairwise(cuts)]
        return Call(
            keys=keys,
            names=[str(key) for key in keys],
            objects=[(key, self.source[span].data) for key, span in zip(keys, spans, strict=True)],
            wanted=[(key, self.target[span].data) for key, span in zip(keys, spans, strict=True)],
            sources=[self.source.ctypes.data + cut for cut in cuts[:-1]],
            targets=[self.target.ctypes.data + cut for cut in cuts[:-1]],
            sizes=[num_bytes for _, num_bytes in sized],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The objects of one call as page stores take them, and as raw addresses."""

    keys: list[ObjectKey]
    names: list[str]
    objects: list[tuple[ObjectKey, memoryview]]
    wanted: list[tuple[ObjectKey, memoryview]]
    sources: list[int]
    targets: list[int]
    sizes: list[int]


class Way(Protocol):
    """A way to move objects. Each method handles all objects of a call, and may not fail."""

    async def put(self, call: Call) -> None: ...

    async def get(self, call: Call) -> None: ...

    async def contains(self, call: Call) -> None: ...

    async def remove(self, call: Call) -> None: ...


class Memcpy:
    """A plain copy to the target, for put and for get."""

    async def put(self, call: Call) -> None:
        for (_, body), (_, view) in zip(call.objects, call.wanted, strict=True):
            view[:] = body

    get = put

    async def contains(self, call: Call) -> None:
        pass

    remove = contains


class Stored:
    """A page store: sealed objects, verified and confirmed."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    async def put(self, call: Call) -> None:
        assert set(await self._store.put(call.objects)) == {Put.STORED}

    async def get(self, call: Call) -> None:
        assert set(await self._store.get(call.wanted)) == {Got.HIT}

    async def contains(self, call: Call) -> None:
        assert all(await self._store.contains(call.keys))

    async def remove(self, call: Call) -> None:
        await self._store.remove(call.keys)


class Plain:
    """Mooncake's own blocking client: one native call each, without seal and confirmation."""

    def __init__(self, client: PlainClient, memory: Memory) -> None:
        self._native = client.native
        for buffer in (memory.source, memory.target):
            assert self._native.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0

    async def put(self, call: Call) -> None:
        assert set(self._native.batch_put_from(call.names, call.sources, call.sizes)) == {0}

    async def get(self, call: Call) -> None:
        assert self._native.batch_get_into(call.names, call.targets, call.sizes) == call.sizes

    async def contains(self, call: Call) -> None:
        assert set(self._native.batch_is_exist(call.names)) == {1}

    async def remove(self, call: Call) -> None:
        self._native.batch_remove(call.names, force=True)


def touch_lent(service: Mooncake, client: PlainClient, memory: Memory) -> None:
    """Fill the memory of the owner once, to avoid page faults later, and empty it."""
    count = int(FILL_SHARE * service.lent_bytes) // FILL_BYTES
    names = [f"fill {index}" for index in range(count)]
    source = memory.source.ctypes.data
    assert set(client.native.batch_put_from(names, [source] * count, [FILL_BYTES] * count)) == {0}
    client.clear()


class MasterLoad(NamedTuple):
    """The load of the master: requests, and the objects in all of them."""

    requests: int
    objects: int

    def since(self, earlier: "MasterLoad") -> "MasterLoad":
        return MasterLoad(self.requests - earlier.requests, self.objects - earlier.objects)


def master_load(service: Mooncake) -> MasterLoad:
    """Return the load since the start, of requests for several objects, as all ways send."""
    counts = {"_requests_total": 0.0, "_items_total": 0.0}
    for line in service.ask("/metrics").splitlines():
        name, _, value = line.partition(" ")
        for ending in counts:
            if name.startswith("master_batch_") and name.endswith(ending):
                counts[ending] += float(value)
    return MasterLoad(*map(int, counts.values()))


def cpu_s(pid: int) -> float:
    """Return the CPU time of another process; its clock id is that of clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)
