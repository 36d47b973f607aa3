"""A ring of host memory between arena and store, for device memory that the store cannot reach itself.

    put    arena --copy--> ring --store.put-->        get    --store.get--> ring --copy--> arena

CUDA memory needs it where the transport cannot register it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext

import torch
from torch import Tensor

from tidemill.kvstore.stores.page_store import Got, PageStore, Put, finish
from tidemill.workers.device_errors import is_sticky
from tidemill.workers.messages import WorkerGone
from tidemill.workers.settings import SettingsError
from tidemill.workers.transfer.arena_io import StagedObject

PIECES = 4
"""The maximum number of pieces of a transfer in flight: one is copied while others are with the store."""


class StagingRing:
    """`ring_bytes` of host memory, pinned for CUDA, through which objects pass in pieces.

    A piece is several objects in order. While the ring is full, calls and pieces wait in order of arrival:
    the ring bounds the bytes in flight. A put in several pieces is as many puts of the store, one after
    another. So a store that is too small for all may evict the first for the last.
    """

    def __init__(
        self, store: PageStore, device_memory: Tensor, ring_bytes: int, object_bytes_max: int
    ) -> None:
        """Create a ring. `device_memory` is uint8 [bytes]. Raises SettingsError when an object is larger than
        the ring: pinning memory for it alone would take longer than the transfer."""
        if object_bytes_max > ring_bytes:
            raise SettingsError(
                f"an object of {object_bytes_max:,} bytes does not pass a staging ring of {ring_bytes:,}:"
                f" make the ring {-(-object_bytes_max // (1 << 20))} MiB, or a multiple of that for speed"
            )
        assert device_memory.dtype == torch.uint8
        self.store = store
        self._device_memory = device_memory
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8, pin_memory=device_memory.is_cuda)
        self._view = self._ring.numpy().data
        self._piece_bytes = max(object_bytes_max, ring_bytes // PIECES)
        self._spans = Spans(ring_bytes)
        self._out, self._in = Lane("stage-out", device_memory), Lane("stage-in", device_memory)
        store.register(self._view)

    @property
    def used_bytes(self) -> int:
        """The used bytes of the ring."""
        return self._spans.used_bytes

    async def put(self, objects: Sequence[StagedObject]) -> list[Put]:
        pieces: list[asyncio.Task[list[Put]]] = []
        async with _together() as group:
            for piece in self._pieces(objects):
                before = pieces[-1] if pieces else None
                pieces.append(group.create_task(self._put_piece(piece, before)))
        return [outcome for piece in pieces for outcome in piece.result()]

    async def get(self, wanted: Sequence[StagedObject]) -> list[Got]:
        async with _together() as group:
            pieces = [group.create_task(self._get_piece(piece)) for piece in self._pieces(wanted)]
        return [outcome for piece in pieces for outcome in piece.result()]

    async def close(self) -> None:
        """Close the lanes. No call may be in progress."""
        await self._out.close()
        await self._in.close()

    async def _put_piece(
        self, piece: Sequence[StagedObject], before: asyncio.Task[list[Put]] | None
    ) -> list[Put]:
        """Copy the piece while the previous one is stored, then store it. The previous one has its memory,
        because memory is granted in order of arrival: no two pieces wait for each other."""
        async with self._spans.take(_num_bytes(piece)) as start:
            parts = _parts(piece, start)
            if not _ends_in_loss(before):
                await self._out.copy(
                    [(self._ring[part], self._of(staged)) for staged, part in zip(piece, parts, strict=True)]
                )
            if before is not None:
                await asyncio.wait({before})
            if _ends_in_loss(before):
                return [Put.SKIPPED] * len(piece)
            return await self.store.put(
                [(staged.key, self._view[part]) for staged, part in zip(piece, parts, strict=True)]
            )

    async def _get_piece(self, piece: Sequence[StagedObject]) -> list[Got]:
        async with self._spans.take(_num_bytes(piece)) as start:
            parts = _parts(piece, start)
            outcomes = await self.store.get(
                [(staged.key, self._view[part]) for staged, part in zip(piece, parts, strict=True)]
            )
            await self._in.copy(
                [
                    (self._of(staged), self._ring[part])
                    for staged, part, outcome in zip(piece, parts, outcomes, strict=True)
                    if outcome is Got.HIT
                ]
            )
            return outcomes

    def _of(self, staged: StagedObject) -> Tensor:
        return self._device_memory[staged.offset : staged.offset + staged.num_bytes]

    def _pieces(self, objects: Sequence[StagedObject]) -> Iterator[list[StagedObject]]:
        """Yield all objects, in order, as many together as fit into a piece."""
        piece: list[StagedObject] = []
        for staged in objects:
            assert staged.num_bytes <= self._piece_bytes
            if piece and _num_bytes(piece) + staged.num_bytes > self._piece_bytes:
                yield piece
                piece = []
            piece.append(staged)
        if piece:
            yield piece


class Spans:
    """Allocates ranges of a ring, in order of arrival."""

    def __init__(self, ring_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._taken: dict[int, int] = {}  # start -> end
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    @asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncGenerator[int]:
        """Yield the start of a range that is reserved until this is left."""
        assert num_bytes <= self._ring_bytes
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, granted))
        self._admit()
        try:
            yield await granted
        finally:
            if granted.done() and not granted.cancelled():
                del self._taken[granted.result()]
            granted.cancel()
            self._admit()

    @property
    def used_bytes(self) -> int:
        return sum(end - start for start, end in self._taken.items())

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, granted = self._waiting[0]
            if not granted.done():
                start = self._gap(num_bytes)
                if start is None:
                    return
                self._taken[start] = start + num_bytes
                granted.set_result(start)
            self._waiting.popleft()

    def _gap(self, num_bytes: int) -> int | None:
        start = 0
        for taken, end in sorted(self._taken.items()):
            if start + num_bytes <= taken:
                return start
            start = end
        return start if start + num_bytes <= self._ring_bytes else None


class Lane:
    """Copies in one direction, on a thread and, for CUDA, a stream of its own: steps and the other direction
    continue meanwhile.

    Nothing orders it after the kernels of a step: what is put was written by a step that has landed, and
    what a get fills is used by steps that start after it.
    """

    def __init__(self, name: str, device_memory: Tensor) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._stream = torch.cuda.Stream(device_memory.device) if device_memory.is_cuda else None

    async def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy into the first of each pair from the second. A cancelled call ends when its copies have
        ended."""
        await finish(asyncio.wrap_future(self._thread.submit(self._copy, pairs)))

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


@asynccontextmanager
async def _together() -> AsyncGenerator[asyncio.TaskGroup]:
    """Raise the first error of the tasks, and WorkerGone if the device has failed."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        (first, *_) = errors.exceptions
        if is_sticky(first):
            raise WorkerGone(f"the device failed in a copy: {first}") from first
        raise first from None


def _parts(piece: Sequence[StagedObject], start: int) -> list[slice]:
    """Return the bytes of the ring that each object has."""
    parts: list[slice] = []
    for staged in piece:
        parts.append(slice(start, start + staged.num_bytes))
        start += staged.num_bytes
    return parts


def _num_bytes(piece: Sequence[StagedObject]) -> int:
    return sum(staged.num_bytes for staged in piece)


def _ends_in_loss(before: asyncio.Task[list[Put]] | None) -> bool:
    """Return whether the last object of `before` is known to be missing, so that later ones may not be
    stored."""
    return before is not None and before.done() and not before.result()[-1].is_there
