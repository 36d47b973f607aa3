# pyright: basic
# Mooncake's library is a compiled one without types.
"""Ways to move the same objects: through a page store, or raw, with nothing around what moves the bytes."""

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
"""The master evicts beyond 0.9."""

Sized = Sequence[tuple[Kind, int]]
"""Kind and bytes of each object of a call."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Where objects come from and where they arrive; touched, so that no way pays for its page faults."""

    source: np.ndarray
    target: np.ndarray

    @classmethod
    def of(cls, num_bytes: int) -> "Memory":
        source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        return cls(source, np.zeros_like(source))

    def calls(self, sized: Sequence[Sized], rng: Random) -> list["Call"]:
        """One for each element of `sized`, under keys that nobody had; their bytes are side by side."""
        made, start = [], 0
        for sized_case in sized:
            made.append(self._call(sized_case, start, rng))
            start += sum(made[-1].sizes)
        return made

    def arrived(self, calls: Sequence["Call"]) -> bool:
        """Whether the target holds the bytes of these calls."""
        end = sum(num_bytes for call in calls for num_bytes in call.sizes)
        return bool(np.array_equal(self.source[:end], self.target[:end]))

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
    """Each call moves, or asks after, all objects of one call. None may fail."""

    async def put(self, call: Call) -> None: ...

    async def get(self, call: Call) -> None: ...

    async def contains(self, call: Call) -> None: ...

    async def remove(self, call: Call) -> None: ...


class Memcpy:
    """To the target and to the target again."""

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
    """Mooncake's own client, which blocks: one native call each, no seal, no question afterwards."""

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
    """Fill the memory of the owner once, so that nobody pays for its page faults, and empty it."""
    count = int(FILL_SHARE * service.lent_bytes) // FILL_BYTES
    names = [f"fill {index}" for index in range(count)]
    source = memory.source.ctypes.data
    assert set(client.native.batch_put_from(names, [source] * count, [FILL_BYTES] * count)) == {0}
    client.clear()


class Asked(NamedTuple):
    """What the master was asked: requests, and objects in all of them together."""

    requests: int
    objects: int

    def since(self, earlier: "Asked") -> "Asked":
        return Asked(self.requests - earlier.requests, self.objects - earlier.objects)


def asked_of(service: Mooncake) -> Asked:
    """Since it started, of requests for several objects: those of all ways."""
    counts = {"_requests_total": 0.0, "_items_total": 0.0}
    for line in service.ask("/metrics").splitlines():
        name, _, value = line.partition(" ")
        for ending in counts:
            if name.startswith("master_batch_") and name.endswith(ending):
                counts[ending] += float(value)
    return Asked(*map(int, counts.values()))


def cpu_s(pid: int) -> float:
    """Of all threads of another process: its clock has the number that clock_getcpuclockid(3) gives."""
    return time.clock_gettime(~pid << 3 | 2)
