"""A store that takes its time, and remembers what it was asked for."""

import asyncio
import math
from collections.abc import Sequence

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, Put

STORE_BYTES = 1 << 20


class TimedStore(MemoryStore):
    """Takes `get_s` and `put_s` of time, also waits until `opened`, and is patient for `patience`. A get
    fills the views with noise before it waits."""

    def __init__(self, *, get_s: float = 0.0, put_s: float = 0.0, patience: float = math.inf) -> None:
        super().__init__(STORE_BYTES)
        self.get_s = get_s
        self.put_s = put_s
        self.patience = patience
        self.opened = asyncio.Event()
        self.opened.set()
        self.puts: list[list[ObjectKey]] = []
        self.gets: list[list[ObjectKey]] = []
        self.asked: list[list[ObjectKey]] = []
        self.refuses = 0  # puts from now on
        self.under_way = 0

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        self.puts.append([key for key, _ in objects])
        await self._wait(self.put_s)
        if self.refuses:
            self.refuses -= 1
            return [Put.FULL, *[Put.SKIPPED] * (len(objects) - 1)][: len(objects)]
        return await super().put(objects)

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        self.gets.append([key for key, _ in wanted])
        for _, view in wanted:
            view[:] = bytes([0xEE]) * len(view)
        await self._wait(self.get_s)
        return await super().get(wanted)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self.asked.append(list(keys))
        return await super().contains(keys)

    def patience_s(self, num_bytes: int) -> float:  # noqa: ARG002
        return self.patience

    async def _wait(self, seconds: float) -> None:
        self.under_way += 1
        try:
            await self.opened.wait()
            await asyncio.sleep(seconds)
        finally:
            self.under_way -= 1
