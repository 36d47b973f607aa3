"""The RemoteClient over Mooncake's native client, whose calls block: threads and addresses."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from tidemill.kvstore.stores.page_store import finish
from tidemill.kvstore.stores.remote_store import Parts

_Result = TypeVar("_Result")

GET_THREADS = 2
OWNER_FAILED = -800


class Native(Protocol):
    """The part of MooncakeDistributedStore that is used. Its calls let go of the interpreter; objects consist
    of the bytes at several addresses."""

    def setup(self, *arguments: str | int) -> int: ...

    def register_buffer(self, address: int, num_bytes: int) -> int: ...

    def unregister_buffer(self, address: int) -> int: ...

    def batch_put_from_multi_buffers(
        self, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]], config: object
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Any]]: ...

    def batch_is_exist(self, names: Sequence[str]) -> list[int]: ...

    def batch_remove(self, names: Sequence[str], *, force: bool) -> list[int]: ...

    def close(self) -> int: ...


class MooncakeClient:
    """Puts, gets and questions have threads of their own: none holds up the others when it hangs.

    readers     for whoever reads what was moved, or will be
    """

    def __init__(self, native: Native, config: object, *, stages: bool) -> None:
        """`config` is the ReplicateConfig of all puts. With `stages`, memory that was not registered moves
        through a copy that is: RDMA moves nothing else, TCP does."""
        self._native = native
        self._config = config
        self._stages = stages
        self._registered: list[range] = []
        self._putting = ThreadPoolExecutor(1, thread_name_prefix="mooncake-put")
        self._getting = ThreadPoolExecutor(GET_THREADS, thread_name_prefix="mooncake-get")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="mooncake-ask")
        self.readers = ThreadPoolExecutor(GET_THREADS, thread_name_prefix="mooncake-read")

    async def put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        return await _on(self._putting, lambda: self._put(names, objects))

    async def get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        return await _on(self._getting, lambda: self._get(names, objects))

    async def exist(self, names: Sequence[str]) -> list[int]:
        return await _on(self._asking, lambda: self._native.batch_is_exist(names))

    async def remove(self, names: Sequence[str]) -> list[int]:
        """By force: leases are for those who read it, and they find out."""
        return await _on(self._asking, lambda: self._native.batch_remove(names, force=True))

    def register(self, memory: memoryview) -> None:
        place = _place(memory)
        if self._native.register_buffer(place.start, len(place)) == 0:
            self._registered.append(place)

    async def close(self) -> None:
        for pool in (self._putting, self._getting, self._asking, self.readers):
            await asyncio.to_thread(pool.shutdown)
        await asyncio.to_thread(self._native.close)

    def _put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        with self._staged(objects, copies_in=True) as places:
            return self._native.batch_put_from_multi_buffers(names, *_described(places), self._config)

    def _get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        with self._staged(objects, copies_in=False) as places:
            codes = self._native.batch_get_into_multi_buffers(names, *_described(places))
        failed = [index for index, code in enumerate(codes) if code == OWNER_FAILED]
        if failed:  # it says so of objects that are shorter than their views, too
            found = self._native.batch_get_replica_desc([names[index] for index in failed])
            for index in failed:
                sizes = [_size(replica) for replica in found.get(names[index], [])]
                if sizes and sizes[0] != sum(part.nbytes for part in objects[index]):
                    codes[index] = sizes[0]
        return codes

    @contextmanager
    def _staged(self, objects: Sequence[Parts], *, copies_in: bool) -> Generator[list[list[range]]]:
        """Where the parts of each object are, or their copies; copies go back in the end, if not in first."""
        places = [[_place(part) for part in parts] for parts in objects]
        foreign = [
            (parts, index, objects[number][index])
            for number, parts in enumerate(places)
            for index, place in enumerate(parts)
            if self._stages
            and not any(place.start in known and place[-1] in known for known in self._registered)
        ]
        if not foreign:
            yield places
            return
        stage = memoryview(bytearray(sum(part.nbytes for _, _, part in foreign)))
        base, offset = _place(stage), 0
        self._native.register_buffer(base.start, len(base))
        copies: list[tuple[memoryview, memoryview]] = []
        for parts, index, part in foreign:
            parts[index] = base[offset : offset + part.nbytes]
            copies.append((part, stage[offset : offset + part.nbytes]))
            offset += part.nbytes
        if copies_in:
            for part, copy in copies:
                copy[:] = part
        try:
            yield places
        finally:
            self._native.unregister_buffer(base.start)
        if not copies_in:
            for part, copy in copies:
                part[:] = copy


async def _on(pool: Executor, work: Callable[[], _Result]) -> _Result:
    return await finish(asyncio.get_running_loop().run_in_executor(pool, work))


def _place(view: memoryview) -> range:
    """Its addresses."""
    start = np.frombuffer(view, np.uint8).ctypes.data
    return range(start, start + view.nbytes)


def _described(places: list[list[range]]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes."""
    return (
        [[place.start for place in parts] for parts in places],
        [[len(place) for place in parts] for parts in places],
    )


def _size(replica: Any) -> int:  # noqa: ANN401 - a class of the library
    return replica.get_memory_descriptor().buffer_descriptor.size if replica.is_memory_replica() else 0
