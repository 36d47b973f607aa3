"""A page store that fails in every way that its contract allows, in virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from random import Random

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, Put, StoreCounters, StoreStats, finish, full_after
from tidemill.kvstore.stores.seal import PLAIN, Sealing

CAPACITY_BYTES = 1 << 40


class FaultyStore(MemoryStore):
    """A memory store with faults. Equal `rng` and equal order of calls give equal faults.

    drop, refuse    probability per object put: STORED but lost immediately; FULL, with the rest SKIPPED
    evict, corrupt  probability per call: a random object disappears; a random bit of one flips
    delay_s_max     the limit of the two pauses of put and get, and of the pause of contains
    fail, recover   make all objects unreachable, for calls that then fail after `blocks_s`

    Between its pauses a get fills every view with noise, and a put has stored some of its objects. This
    exposes callers that read or free the memory of a running call.
    """

    def __init__(
        self,
        rng: Random,
        *,
        drop: float = 0.0,
        evict: float = 0.0,
        corrupt: float = 0.0,
        refuse: float = 0.0,
        delay_s_max: float = 0.0,
        capacity_bytes: int = CAPACITY_BYTES,
        sealing: Sealing = PLAIN,
    ) -> None:
        super().__init__(capacity_bytes, sealing)
        self.is_down = False
        self._blocks_s = 0.0
        self._is_up = asyncio.Event()
        self._asked = StoreCounters()
        self._rng = rng
        self._drop = drop
        self._evict = evict
        self._corrupt = corrupt
        self._refuse = refuse
        self._delay_s_max = delay_s_max

    def fail(self, blocks_s: float) -> None:
        self.is_down, self._blocks_s = True, blocks_s
        self._is_up.clear()

    def recover(self) -> None:
        """Let calls that are still blocked continue, and succeed."""
        self.is_down = False
        self._is_up.set()

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        outcomes = await finish(asyncio.ensure_future(self._put(objects)))
        self._asked.add_put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        outcomes = await finish(asyncio.ensure_future(self._get(wanted)))
        self._asked.add_get(wanted, outcomes)
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        await self._answers()
        return [False] * len(keys) if self.is_down else await super().contains(keys)

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        await self._answers()
        await super().remove(keys)

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        await self._pause()
        await super().demote(keys)

    def stats(self) -> StoreStats:
        held = super().stats()
        asked = self._asked.stats(
            objects=held.objects, num_bytes=held.bytes, capacity_bytes=held.capacity_bytes
        )
        return replace(asked, evicted=held.evicted)

    async def _put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        offered = list(takewhile(lambda _: self._rng.random() >= self._refuse, objects))
        first = self._rng.randrange(len(offered) + 1)
        await self._answers()
        outcomes = await self._put_now(offered[:first])
        await self._pause()
        if all(outcome.is_there for outcome in outcomes):
            outcomes += (await self._put_now(offered))[first:]
        for (key, _), outcome in zip(offered, outcomes, strict=False):
            if outcome is Put.STORED and self._rng.random() < self._drop and key in self.objects:
                self.forget(key)
        return outcomes + full_after(outcomes, objects)

    async def _put_now(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        if self.is_down:
            return [Put.UNREACHABLE, *[Put.SKIPPED] * (len(objects) - 1)][: len(objects)]
        return await super().put(objects)

    async def _get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        await self._answers()
        for _, view in wanted:
            view[:] = self._rng.randbytes(view.nbytes)
        await self._pause()
        return [Got.UNREACHABLE] * len(wanted) if self.is_down else await super().get(wanted)

    async def _answers(self) -> None:
        """Pause, and while the store is down for as long as its calls block."""
        await self._pause()
        if self.is_down and self._blocks_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._blocks_s):
                    await self._is_up.wait()

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.random() * self._delay_s_max)
        held = self.objects
        if held and self._rng.random() < self._evict:
            self.forget(self._rng.choice(list(held)))
        if held and self._rng.random() < self._corrupt:
            damaged = held[self._rng.choice(list(held))]
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
