"""A store in memory that is down or slow at given times, for tests of the circuit breaker."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.circuit_breaker import ABSENT, PROBE
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, Put, finish


@dataclass(frozen=True)
class Fault:
    """Calls from `start` to `end` take `blocks_s`, at most until the end, and then fail.

    slow      Calls succeed after that time, and probes are not delayed.
    frozen    Only calls that move bytes hang; metadata is available.
    """

    start: float
    end: float
    blocks_s: float
    slow: bool = False
    frozen: bool = False


class Scripted(MemoryStore):
    """A store with faults at given times, which counts calls and running probes."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(1 << 30)
        self.calls = Counter[str]()
        self.probes_out = self.probes_out_max = 0
        self.probed_at: list[float] = []
        self._faults = faults

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        self.calls["put"] += 1
        if await self._fails():
            return [Put.UNREACHABLE, *[Put.SKIPPED] * (len(objects) - 1)]
        return await super().put(objects)

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        task = asyncio.current_task()
        if task is not None and task.get_name() == PROBE:
            return await self._probe(wanted[0][0])
        self.calls["get"] += 1
        return await finish(asyncio.ensure_future(self._get(wanted)))

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self.calls["contains"] += 1
        return [False] * len(keys) if await self._fails() else await super().contains(keys)

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        self.calls["remove"] += 1
        if not await self._fails():
            await super().remove(keys)

    async def _get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        fails = await self._fails()
        for _, view in wanted:
            view[:] = b"\xee" * view.nbytes
        return [Got.UNREACHABLE] * len(wanted) if fails else await super().get(wanted)

    async def _probe(self, key: ObjectKey) -> list[Got]:
        self.probed_at.append(now())
        self.probes_out += 1
        self.probes_out_max = max(self.probes_out, self.probes_out_max)
        try:
            return [Got.UNREACHABLE if await self._fails(moves=key != ABSENT, is_probe=True) else Got.MISS]
        finally:
            self.probes_out -= 1

    async def _fails(self, *, moves: bool = True, is_probe: bool = False) -> bool:
        await asyncio.sleep(0.001)
        for fault in self._faults:
            is_spared = (fault.slow and is_probe) or (fault.frozen and not moves)
            if fault.start <= now() < fault.end and not is_spared:
                await asyncio.sleep(min(fault.blocks_s, fault.end - now()))
                return not fault.slow
        return False


def now() -> float:
    return asyncio.get_running_loop().time()
