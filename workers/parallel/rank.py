"""One of the other ranks of a group: it carries out the leader's calls, and ends when the leader does."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Never

import torch

from tidemill.kvstore.errors import OutOfMemory, TidemillError
from tidemill.kvstore.memory.backing import Backing
from tidemill.workers.execution.step import Step
from tidemill.workers.parallel.frames import (
    HEAD,
    INT_BYTES,
    Frame,
    Ints,
    Verb,
    decode,
    decode_objects,
    encode_text,
    frame_of,
    ints,
    to_bytes,
)
from tidemill.workers.parallel.link import hello
from tidemill.workers.parallel.network import Meeting, Network, connect
from tidemill.workers.transfer.transfer import Mate


@dataclass(frozen=True, slots=True)
class RankParts:
    """A rank's parts of the worker. `run` blocks until its part of the step is over."""

    backing: Backing
    transfer: Mate  # its own end
    run: Callable[[Step], None]
    threads: int = 1


async def carry_out(
    meeting: Meeting, index: int, build: Callable[[], RankParts], network: Network | None = None
) -> None:
    """Connect to the leader, build this rank's part, and carry out calls until the leader is gone.

    Raises what broke here, after it was reported to the leader. In any case the process must then end by
    `os._exit`: a thread of it may hang in a step whose other ranks are gone, or be busy with `build`.
    """
    reader, writer = await connect(meeting, network)
    try:
        writer.write(hello(index, meeting))
        building = asyncio.ensure_future(asyncio.to_thread(build))
        first = asyncio.ensure_future(_read(reader))
        await asyncio.wait({building, first}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            return
        obeying = _Obeying(building.result(), writer)
        writer.write(to_bytes(Verb.READY, 0, ints()))
        reading = asyncio.ensure_future(_obey_all(first, reader, obeying))
        await asyncio.wait({reading, obeying.broken}, return_when=asyncio.FIRST_COMPLETED)
        if obeying.broken.done():
            obeying.broken.result()
        reading.result()
    except Exception as error:
        writer.write(to_bytes(Verb.FAILED, 0, encode_text(_line(error))))
        raise


class _Obeying:
    """Carries out frames in order of arrival: steps one after the other on a thread, mappings immediately,
    transfers concurrently."""

    def __init__(self, part: RankParts, writer: asyncio.StreamWriter) -> None:
        self.broken: asyncio.Future[Never] = asyncio.get_running_loop().create_future()
        self._part = part
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "step", torch.set_num_threads, (part.threads,))
        self._under_way: set[asyncio.Future[None]] = set()

    def execute(self, frame: Frame) -> None:
        match frame.verb:
            case Verb.STEP:
                run = asyncio.get_running_loop().run_in_executor
                self._begin(run(self._thread, self._part.run, decode(frame.body)))
            case Verb.MAP:
                self._answer(frame, self._map(frame.body))
            case Verb.MAP_AHEAD:
                offset_bytes, num_bytes = frame.body.tolist()
                self._part.backing.map_ahead(offset_bytes, num_bytes)
            case Verb.UNMAP:
                offset_bytes, num_bytes = frame.body.tolist()
                self._part.backing.unmap(offset_bytes, num_bytes)
            case Verb.PUT | Verb.GET:
                self._begin(asyncio.ensure_future(self._move(frame)))
            case _:
                raise AssertionError(f"the leader sent {frame.verb.name}")

    def _begin(self, work: "asyncio.Future[None]") -> None:
        self._under_way.add(work)
        work.add_done_callback(self._ended)

    def _ended(self, work: "asyncio.Future[None]") -> None:
        self._under_way.remove(work)
        error = work.exception()
        if error is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def _move(self, frame: Frame) -> None:
        transfer = self._part.transfer
        move = transfer.put if frame.verb is Verb.PUT else transfer.get
        self._answer(frame, await move(decode_objects(frame.body)))

    def _map(self, body: Ints) -> int:
        offset_bytes, num_bytes = body.tolist()
        try:
            self._part.backing.map(offset_bytes, num_bytes)
        except OutOfMemory:
            return 0
        return 1

    def _answer(self, frame: Frame, answer: int) -> None:
        self._writer.write(to_bytes(Verb.ANSWER, frame.number, ints((answer,))))


async def _obey_all(
    first: "asyncio.Future[Frame | None]", reader: asyncio.StreamReader, to: _Obeying
) -> None:
    frame = await first
    while frame is not None:
        to.execute(frame)
        frame = await _read(reader)


async def _read(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame. None at the end of the stream, also in the middle of a frame."""
    try:
        head = await reader.readexactly(HEAD.size)
        return frame_of(head, await reader.readexactly(HEAD.unpack(head)[0] * INT_BYTES))
    except (asyncio.IncompleteReadError, OSError):
        return None


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TidemillError) else f"{type(error).__name__}: {text}"
