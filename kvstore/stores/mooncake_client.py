"""A RemoteClient over the native client of Mooncake: runs its blocking calls on threads."""

import asyncio
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from tidemill.kvstore.stores.page_store import READ_THREADS, run_on
from tidemill.kvstore.stores.remote_store import Parts

GET_THREADS = 2
OWNER_FAILED = -800


class NativeStore(Protocol):
    """The used part of MooncakeDistributedStore. Its calls release the GIL. An object consists of the bytes
    at several addresses."""

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
    """Puts, gets and queries have separate threads: one that hangs does not block the others.

    readers     threads for callers that read the bytes of transfers, to seal and verify them
    """

    def __init__(self, native: NativeStore, config: object, *, stages: bool) -> None:
        """Use the ReplicateConfig `config` for all puts. With `stages`, memory that is not registered is
        transferred through a registered copy: RDMA needs that, TCP does not."""
        self._native = native
        self._config = config
        self._stages = stages
        self._registered: list[range] = []
        self._putting = ThreadPoolExecutor(1, thread_name_prefix="mooncake-put")
        self._getting = ThreadPoolExecutor(GET_THREADS, thread_name_prefix="mooncake-get")
        self._querying = ThreadPoolExecutor(1, thread_name_prefix="mooncake-query")
        self.readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="mooncake-read")

    async def put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        return await run_on(self._putting, lambda: self._put(names, objects))

    async def get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        return await run_on(self._getting, lambda: self._get(names, objects))

    async def exist(self, names: Sequence[str]) -> list[int]:
        return await run_on(self._querying, lambda: self._native.batch_is_exist(names))

    async def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects even while they are leased; concurrent readers detect the loss."""
        return await run_on(self._querying, lambda: self._native.batch_remove(names, force=True))

    def register(self, memory: memoryview) -> None:
        addresses = _addresses(memory)
        if self._native.register_buffer(addresses.start, len(addresses)) == 0:
            self._registered.append(addresses)

    async def close(self) -> None:
        for pool in (self._putting, self._getting, self._querying, self.readers):
            await asyncio.to_thread(pool.shutdown)
        await asyncio.to_thread(self._native.close)

    def _put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        with self._staged(objects, copies_in=True) as located:
            return self._native.batch_put_from_multi_buffers(names, *_starts_and_sizes(located), self._config)

    def _get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        with self._staged(objects, copies_in=False) as located:
            codes = self._native.batch_get_into_multi_buffers(names, *_starts_and_sizes(located))
        failed = [index for index, code in enumerate(codes) if code == OWNER_FAILED]
        if failed:  # the same code stands for an object that is shorter than its view
            found = self._native.batch_get_replica_desc([names[index] for index in failed])
            for index in failed:
                sizes = [_size(replica) for replica in found.get(names[index], [])]
                if sizes and sizes[0] != sum(part.nbytes for part in objects[index]):
                    codes[index] = sizes[0]
        return codes

    @contextmanager
    def _staged(self, objects: Sequence[Parts], *, copies_in: bool) -> Generator[list[list[range]]]:
        """Yield the addresses of the parts of each object, or of registered copies of them. Parts are copied
        in before the body, or out after it."""
        located = [[_addresses(part) for part in parts] for parts in objects]
        foreign = [
            (parts, index, objects[number][index])
            for number, parts in enumerate(located)
            for index, part in enumerate(parts)
            if self._stages
            and not any(part.start in known and part[-1] in known for known in self._registered)
        ]
        if not foreign:
            yield located
            return
        stage = memoryview(bytearray(sum(part.nbytes for _, _, part in foreign)))
        base, offset = _addresses(stage), 0
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
            yield located
        finally:
            self._native.unregister_buffer(base.start)
        if not copies_in:
            for part, copy in copies:
                part[:] = copy


def _addresses(view: memoryview) -> range:
    start = np.frombuffer(view, np.uint8).ctypes.data
    return range(start, start + view.nbytes)


def _starts_and_sizes(located: list[list[range]]) -> tuple[list[list[int]], list[list[int]]]:
    return (
        [[part.start for part in parts] for parts in located],
        [[len(part) for part in parts] for parts in located],
    )


def _size(replica: Any) -> int:  # noqa: ANN401 - a class of the library
    return replica.get_memory_descriptor().buffer_descriptor.size if replica.is_memory_replica() else 0
