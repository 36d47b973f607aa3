"""The embedded page store: one file per object, in a folder on disk, in tmpfs or on a network."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.object_folder import ObjectFolder
from tidemill.kvstore.stores.page_store import (
    READ_THREADS,
    Got,
    Objects,
    Put,
    StoreCounters,
    StoredObject,
    StoreStats,
    finish,
    run_on,
    shares_of,
)
from tidemill.kvstore.stores.seal import PLAIN, Sealing


class FileStore:
    """Needs no server, survives restarts, and is shared by all processes of one user.

    Each process enforces its own capacity when it puts, so the smallest capacity is effective. All
    file work is on threads: one thread hop per call. Puts run one after another and never delay
    gets.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sealing: Sealing = PLAIN,
    ) -> None:
        """Scan the folder (blocking). Raises StoreError that names the fix."""
        self._folder = ObjectFolder(folder, capacity_bytes, clock, sealing)
        self._capacity_bytes = capacity_bytes
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-put")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="store-get")
        self._counters = StoreCounters()

    async def put(self, objects: Objects) -> list[Put]:
        return await run_on(self._writer, lambda: self._put(objects))

    async def get(self, wanted: Objects) -> list[Got]:
        shares = [run_on(self._readers, partial(self._get, wanted[share])) for share in shares_of(wanted)]
        return [outcome for outcomes in await finish(asyncio.gather(*shares)) for outcome in outcomes]

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await run_on(self._readers, lambda: self._folder.contains(keys))

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        await run_on(self._readers, lambda: self._folder.remove(keys))

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        await run_on(self._readers, lambda: self._folder.demote(keys))

    async def list_objects(self) -> list[StoredObject]:
        try:
            return await run_on(self._readers, self._folder.list_objects)
        except OSError as error:
            raise StoreError(f"the folder of the store cannot be read: {error}") from error

    def register(self, memory: memoryview) -> None:
        pass

    def patience_s(self, num_bytes: int) -> float:  # noqa: ARG002 - the circuit breaker has the limit
        return math.inf

    def stats(self) -> StoreStats:
        objects, num_bytes = self._folder.usage
        return self._counters.stats(objects=objects, num_bytes=num_bytes, capacity_bytes=self._capacity_bytes)

    async def close(self) -> None:
        for pool in (self._writer, self._readers):
            await asyncio.to_thread(pool.shutdown)

    def _put(self, objects: Objects) -> list[Put]:
        evicted_before = self._folder.evicted
        outcomes = self._folder.put(objects)
        self._counters.add_put(objects, outcomes)
        self._counters.add_evicted(self._folder.evicted - evicted_before)
        return outcomes

    def _get(self, wanted: Objects) -> list[Got]:
        outcomes = self._folder.get(wanted)
        self._counters.add_get(wanted, outcomes)
        return outcomes
