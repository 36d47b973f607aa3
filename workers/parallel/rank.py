"""One of the other ranks of a group: it carries out what the leader says, and ends when the leader does."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Never, Protocol

import torch

from tidemill.kvstore.errors import OutOfMemory, TidemillError
from tidemill.kvstore.memory.backing import Backing
from tidemill.kvstore.shards import mine, shards_of
from tidemill.workers.device import open_backing
from tidemill.workers.engine.build import guesser_of, memory_of, mtp_of, open_places, operators_of
from tidemill.workers.execution.model_runner import outputs_of
from tidemill.workers.execution.mtp_drafter import End
from tidemill.workers.execution.step import PENDING, Step
from tidemill.workers.execution.step_tensors import inputs_of
from tidemill.workers.models.architectures.registry import load
from tidemill.workers.models.collectives import Ranks
from tidemill.workers.models.inputs import caches_of
from tidemill.workers.parallel.frames import (
    HEAD,
    INT_BYTES,
    NONE,
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
from tidemill.workers.parallel.group import WAIT_S_MAX
from tidemill.workers.parallel.link import SOCKET
from tidemill.workers.parallel.shared_memory import SharedMemory
from tidemill.workers.settings import EngineSettings
from tidemill.workers.transfer.transfer import Moved, RankTransfer


class Mover(Protocol):
    """What a rank uses of its RankTransfer."""

    async def put(self, objects: Sequence[Moved]) -> int: ...

    async def get(self, objects: Sequence[Moved]) -> int: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of the worker. `run` blocks until its part of the step is over."""

    backing: Backing
    transfer: Mover
    run: Callable[[Step], None]
    threads: int = 1


async def carry_out(folder: Path, index: int, build: Callable[[], Part]) -> None:
    """Meet the leader in `folder`, build this rank's part, and do what the leader says until it is gone.

    Raises what broke here, after the leader has been told. However this ends, the process must end with it,
    by `os._exit`: a thread of it may hang in a step whose other ranks are gone, or be busy with `build`.
    """
    reader, writer = await asyncio.open_unix_connection(folder / SOCKET)
    try:
        writer.write(to_bytes(Verb.HELLO, 0, ints((index,))))
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
    """Frames in the order they come: steps one after the other on a thread, mappings at once, transfers
    beside each other."""

    def __init__(self, part: Part, writer: asyncio.StreamWriter) -> None:
        self.broken: asyncio.Future[Never] = asyncio.get_running_loop().create_future()
        self._part = part
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "step", torch.set_num_threads, (part.threads,))
        self._under_way: set[asyncio.Future[None]] = set()

    def obey(self, frame: Frame) -> None:
        match frame.verb:
            case Verb.STEP:
                run = asyncio.get_running_loop().run_in_executor
                self._begin(run(self._thread, self._part.run, decode(frame.body)))
            case Verb.MAP:
                self._answer(frame, self._map(frame.body))
            case Verb.UNMAP:
                offset_bytes, num_bytes = frame.body.tolist()
                self._part.backing.unmap(offset_bytes, num_bytes)
            case Verb.PUT | Verb.GET:
                self._begin(asyncio.ensure_future(self._move(frame)))
            case _:
                raise AssertionError(f"the leader says {frame.verb.name}")

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
        to.obey(frame)
        frame = await _read(reader)


async def _read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None at the end, also at one amid a frame."""
    try:
        head = await reader.readexactly(HEAD.size)
        return frame_of(head, await reader.readexactly(HEAD.unpack(head)[0] * INT_BYTES))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TidemillError) else f"{type(error).__name__}: {text}"


def build_rank(settings: EngineSettings, index: int, folder: Path) -> Part:
    """Meet the other ranks in `folder`, then load this rank's weights and reserve its memory. Raises what
    `build_engine` does."""
    size = settings.tensor_parallel_size
    ranks = SharedMemory(folder, index, size, WAIT_S_MAX)
    loaded = load(settings.model_folder, operators_of(settings), _nobody_looks, ranks, mtp=mtp_of(settings))
    memory = memory_of(settings, loaded.local_layers, loaded.max_length)
    layout, backing = memory.layout, open_backing(settings, memory.reserved_bytes)
    share = mine(shards_of(loaded.layers, settings.group_sizes), index, size)
    transfer = RankTransfer(layout, open_places(settings, layout, backing.memory, share), share)
    caches = caches_of(layout, backing.memory)
    guesser = guesser_of(settings, loaded, layout, caches)

    def run(step: Step) -> None:
        if not step:
            ranks.broadcast(torch.zeros(1))
            return
        tokens = _tokens(step, ranks)
        if tokens is None:
            return
        with torch.inference_mode():
            inputs = inputs_of(step, tokens, layout.page_tokens)
            outputs = outputs_of(loaded.model, loaded.model.forward(inputs, caches), step)
            ends = None if guesser is None else _ends(step, ranks)
            if guesser is not None and ends is not None:
                guesser.run(step, tokens, outputs.hidden_TH, ends, partial(_chosen, ranks))

    return Part(backing, transfer, run, settings.threads)


def _tokens(step: Step, ranks: Ranks) -> list[int] | None:
    """The tokens of the step, those included that only the leader knows; None when it calls the step off."""
    tokens = [token for row in step for token in row.tokens]
    if PENDING not in tokens:
        return tokens
    told_T = torch.tensor(tokens)
    ranks.broadcast(told_T)
    told: list[int] = told_T.numpy().tolist()
    return None if NONE in told else told


def _ends(step: Step, ranks: Ranks) -> list[End] | None:
    """What the leader drew; None when that failed."""
    told_N2 = torch.zeros(len(step), len(End._fields), dtype=torch.int64)
    ranks.broadcast(told_N2)
    ends = [End(*told) for told in told_N2.numpy().tolist()]
    return None if any(end.num_drawn == NONE for end in ends) else ends


def _chosen(ranks: Ranks, _logits_NV: torch.Tensor, rows: Step) -> list[int]:
    """What the leader guesses."""
    told_N = torch.zeros(len(rows), dtype=torch.int64)
    ranks.broadcast(told_N)
    return told_N.numpy().tolist()


def _nobody_looks(done_bytes: int, total_bytes: int) -> None:
    """The leader's progress stands for that of all ranks."""
