"""Launch a step on a device while the step before it runs there.

    host     | prepare i+1 | launch i+1 |          | tokens of i | prepare i+2 | launch i+2 | ...
    device   [......... i .........................][.............. i+1 ......................

The integers of a step are made while the device computes, in one of two sets of buffers. Page tables and the
last drawn token of each sequence stay on the device, by slot: PENDING is read there. An event ends each step;
the host waits for nothing else. A step whose draws need the host first waits for the steps before it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tidemill.kernels.draw.tables import DrawField
from tidemill.kvstore.memory.backing import Event
from tidemill.kvstore.memory.ledger import FLIGHTS_MAX
from tidemill.workers.device import settle
from tidemill.workers.execution.cuda_graphs import Graph, Graphs
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.mtp_drafter import MtpDrafter
from tidemill.workers.execution.sampler import Wanted, plain_draws, token_ids
from tidemill.workers.execution.step import PENDING, Drawn, Row, Step
from tidemill.workers.execution.step_tensors import Ints, PageTables, copies_of, writes_of
from tidemill.workers.models.architectures.registry import Model
from tidemill.workers.models.inputs import ALIGNED_BYTES, Caches, Inputs, Kept

ON_DEVICE = -2
"""The last token of a sequence, while the host does not know it."""

DTYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}
NUMBERS = [field.name for field in fields(Inputs) if field.name not in {"pages_BN", "windows_BN"}]


class StepEvent(Event, Protocol):
    def synchronize(self) -> None:
        """Wait for the step; raise what broke it."""
        ...


class Stream(Protocol):
    """Runs the device's part of steps, one after the other."""

    device: torch.device

    def launch(self, work: Callable[[], None]) -> StepEvent:
        """Run `work` after all work before it. It may read what the host wrote before this call."""
        ...


class CudaStream:
    """A stream of a CUDA device: `work` only launches kernels."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.device = stream.device
        self.stream = stream

    def launch(self, work: Callable[[], None]) -> StepEvent:
        with torch.cuda.stream(self.stream):
            try:
                work()
            except BaseException:
                self.stream.synchronize()  # memory of the step may be copied or freed from now on
                raise
            event = torch.cuda.Event()
            event.record(self.stream)
        return event


class Prepared(NamedTuple):
    """A step, and its numbers in the order of `_run_on_device`, padded to its graph. `width` is that of its
    page tables."""

    step: Step
    wanted: list[Wanted]
    arrays: list[Ints]
    width: int
    graph: Graph | None


class Buffers:
    """One set of buffers: the numbers of a step in pinned memory, and the tokens that it draws."""

    def __init__(self, device: torch.device, rows_max: int) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self.drawn_N = torch.zeros(rows_max, dtype=torch.int64, pin_memory=self._pinned)
        self._host = torch.zeros(0, dtype=torch.uint8)
        self._used = 0
        self._arrays: list[Ints] = []

    def fill(self, arrays: list[Ints]) -> None:
        """Write the arrays one after the other. The last step that used the set has landed."""
        self._arrays = arrays
        self._used = sum(map(_aligned_bytes, arrays))
        if self._used > len(self._host):
            self._host = torch.zeros(2 * self._used, dtype=torch.uint8, pin_memory=self._pinned)
        memory, start = self._host.numpy(), 0
        for array in arrays:
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += _aligned_bytes(array)

    def send(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy them to the device in one copy. Return their bytes and them there."""
        device_bytes = self._host[: self._used].to(self._device, non_blocking=True, copy=True)
        start, sent = 0, list[torch.Tensor]()
        for array in self._arrays:
            view = device_bytes[start : start + array.nbytes]
            sent.append(view.view(DTYPES[array.dtype.name]).view(array.shape))
            start += _aligned_bytes(array)
        return device_bytes, sent


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step on the device. `reads`: the step whose draws it reads there."""

    prepared: Prepared
    drawn_N: torch.Tensor  # int64, in pinned memory
    event: StepEvent
    reads: "LaunchedStep | None"
    drawn: list[Drawn] | None = None  # None: it has not landed, or it broke

    def land(self) -> list[Drawn]:
        """Wait for the step, and return its draws. Raises what broke it, or the step whose draws it reads."""
        self.event.synchronize()
        if self.reads is not None and self.reads.drawn is None:
            raise RuntimeError("the tokens of the step before are lost")
        self.reads = None
        tokens = iter(token_ids(self.drawn_N[: len(self.prepared.wanted)]))
        self.drawn = [
            Drawn()
            if row.sampling_state is None
            else Drawn((row.sampling_state.drawn_at(row.end, next(tokens)),))
            for row in self.prepared.step
        ]
        return self.drawn


class OverlappedRunner(TorchRunner):
    """Runs steps on a device, at most two at a time."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        page_tokens: int,
        threads: int,
        stream: Stream,
        guesser: MtpDrafter | None,
        tables: PageTables,
    ) -> None:
        """Create a runner. `tables` are empty, and have the limits of a step."""
        super().__init__(model, caches, page_tokens, threads, stream.device, guesser)
        if isinstance(stream, CudaStream):
            self._stream = stream.stream
        self._launches = stream
        self._tables = tables
        self._on_device = _DeviceTables.like(tables, stream.device)
        settle(stream.device)  # it was made on another stream
        self._sets = deque(Buffers(stream.device, len(tables.pages_SN)) for _ in range(FLIGHTS_MAX))
        self._newest: LaunchedStep | None = None  # None: the step before ran alone
        self._landings: deque[Future[list[Drawn]]] = deque(maxlen=FLIGHTS_MAX)
        self._landing = ThreadPoolExecutor(1, "landing")

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        launched = self._thread.submit(self._launch, step, list(self._landings))
        landing = self._landing.submit(_land, launched)
        self._landings.append(landing)
        return asyncio.wrap_future(landing)

    def close(self) -> None:
        super().close()
        self._landing.shutdown()

    def _launch(self, step: Step, before: list["Future[list[Drawn]]"]) -> LaunchedStep | list[Drawn]:
        """Launch the step, or run it alone when the steps `before` have landed."""
        if self._goes_ahead(step):
            if len(before) == FLIGHTS_MAX:
                wait(before[:1])  # its buffers are used again
            return self._launch_ahead(step)
        wait(before)
        newest, self._newest = self._newest, None
        if newest is not None:
            ended = zip(newest.prepared.step, newest.drawn, strict=True) if newest.drawn is not None else ()
            self._last = {row.sequence_id: drawn.tokens[-1] for row, drawn in ended if drawn.tokens}
        return self.run_now(step)

    def _goes_ahead(self, step: Step) -> bool:
        return bool(step) and self._guesser is None and all(map(_draws_on_device, step))

    def _known(self, step: Step, last: Mapping[str, int]) -> Mapping[str, int]:
        """Return the last tokens after a step that ran alone, where ranks of a group know those of the
        leader."""
        del step
        return last

    def _launch_ahead(self, step: Step) -> LaunchedStep:
        before, self._newest = self._newest, None
        last, self._last = self._last, {}
        if before is None:
            last = self._known(step, last)
        self._sets.rotate()
        buffers = self._sets[0]
        try:
            prepared = self._prepare(step, last)
            buffers.fill(prepared.arrays)
            event = self._launches.launch(lambda: self._run_on_device(prepared, buffers))
        except BaseException:
            self._tables.forget()
            raise
        self.newest_step = event
        reads = any(PENDING in row.tokens and last[row.sequence_id] == ON_DEVICE for row in step)
        self._newest = LaunchedStep(prepared, buffers.drawn_N, event, before if reads else None)
        self._last = {row.sequence_id: ON_DEVICE for row in step if row.sampling_state is not None}
        return self._newest

    def _prepare(self, step: Step, last: Mapping[str, int]) -> Prepared:
        """Return the integers of the step, except those of its page tables that the device has."""
        changes = self._tables.update(step)
        slots = changes.slots_B.tolist()
        tokens: list[int] = []
        reads: list[tuple[int, int]] = []  # positions in `tokens`, and slots
        draws: list[tuple[int, int]] = []  # numbers of rows, and slots
        wanted: list[Wanted] = []
        starts = [0]
        for number, (row, slot) in enumerate(zip(step, slots, strict=True)):
            known = row.tokens
            if known[0] == PENDING:
                token = last[row.sequence_id]
                assert token != PENDING, "a row without a mask draws on the host"
                if token == ON_DEVICE:
                    reads.append((len(tokens), slot))
                known = (max(token, 0), *known[1:])
            tokens += known
            starts.append(len(tokens))
            if row.sampling_state is not None:
                draws.append((number, slot))
                wanted.append(Wanted(len(wanted), len(wanted), row.end, row.sampling_state, ()))
        lens_B = np.array([row.end for row in step], np.int32)
        cu_B1 = np.array(starts, np.int32)
        positions_T = np.arange(len(tokens)) + np.repeat(lens_B - cu_B1[1:], np.diff(cu_B1))
        read_B = np.array([-1 if row.read is None else row.read for row in step], np.int32)
        numbers = np.array(tokens, np.int64), positions_T, cu_B1, lens_B, read_B, writes_of(step)
        no_tables = torch.zeros(len(step), 0, dtype=torch.int32)
        inputs = Inputs(
            **dict(zip(NUMBERS, map(torch.as_tensor, numbers), strict=True)),
            pages_BN=no_tables,
            windows_BN=no_tables,
        )
        width = -(-int(lens_B.max()) // self._page_tokens)
        graph = self._graphs.graph_of(inputs, width) if isinstance(self._graphs, Graphs) else None
        draws_2N = np.array(draws, np.int64).reshape(-1, 2).T.copy()
        drawn_there = None
        if graph is not None:  # which computes all tokens, others the last of each row
            inputs = graph.padded(inputs)
            draws_2N[0] = cu_B1[1:][draws_2N[0]] - 1
            drawn_there = None if graph.draws is None else plain_draws(step)
        arrays = [
            *(getattr(inputs, name).numpy() for name in NUMBERS),
            np.array(reads, np.int64).reshape(-1, 2).T.copy(),
            draws_2N,
            np.zeros((0, len(DrawField))) if drawn_there is None else drawn_there,
            *copies_of(step),
            *changes,
        ]
        return Prepared(step, wanted, arrays, width, graph)

    def _run_on_device(self, prepared: Prepared, buffers: Buffers) -> None:
        """Launch the step's part of the device."""
        with torch.inference_mode():
            sent, arrays = buffers.send()
            numbers, (reads, draws, drawn_there, restores, saves, *changes) = (
                arrays[: len(NUMBERS)],
                arrays[len(NUMBERS) :],
            )
            end = None if prepared.graph is None else prepared.graph.draws
            if end is not None and len(drawn_there):
                end.fill(drawn_there)
            if restores.numel():
                self._caches.restore(*restores)
            pages_BN, windows_BN = self._on_device.update(changes, prepared.width)
            drawn_S = self._on_device.drawn_S
            numbers[0][reads[0]] = drawn_S[reads[1]]
            if prepared.graph is not None:
                hidden_TH = prepared.graph.run_there(sent, pages_BN, windows_BN)
            else:
                named = dict(zip(NUMBERS, numbers, strict=True))
                inputs = Inputs(**named, pages_BN=pages_BN, windows_BN=windows_BN)
                kept = Kept.last(inputs.cu_B1) if len(inputs.tokens_T) > len(inputs.lens_B) else None
                hidden_TH = self._model.forward(inputs, self._caches, kept)
            if saves.numel():
                self._save(saves)
            if not prepared.wanted:
                return
            if end is not None and len(drawn_there):
                drawn_N = end.tokens_T[draws[0]]
            else:
                logits_NV = (
                    self._model.logits(hidden_TH[draws[0]]) if end is None else end.logits_TV[draws[0]]
                )
                drawn_N = self._tokens_there(logits_NV, prepared.wanted)
            self._share(drawn_N)
            drawn_S[draws[1]] = drawn_N
            buffers.drawn_N[: len(drawn_N)].copy_(drawn_N, non_blocking=True)

    def _tokens_there(self, logits_NV: torch.Tensor, wanted: list[Wanted]) -> torch.Tensor:
        """Launch the draws; ranks other than the leader have no logits, and get its tokens."""
        if logits_NV.shape[1]:
            return self._sampler.tokens(logits_NV, wanted)
        return torch.zeros(len(wanted), dtype=torch.int64, device=logits_NV.device)


@dataclass(frozen=True, slots=True)
class _DeviceTables:
    """By slot, on the device: page tables, and the last drawn token."""

    pages_SN: torch.Tensor
    windows_SN: torch.Tensor
    drawn_S: torch.Tensor

    @classmethod
    def like(cls, tables: PageTables, device: torch.device) -> "_DeviceTables":
        pages_SN, windows_SN = (
            torch.zeros(table_SN.shape, dtype=torch.int32, device=device)
            for table_SN in (tables.pages_SN, tables.windows_SN)
        )
        return cls(pages_SN, windows_SN, torch.zeros(len(pages_SN), dtype=torch.int64, device=device))

    def update(self, changes: Sequence[torch.Tensor], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter the changes. Return the tables of pages and of windows of the step's rows."""
        slots_B, at_D, pages_D, window_at_D, windows_D = changes
        self.pages_SN.view(-1)[at_D] = pages_D
        self.windows_SN.view(-1)[window_at_D] = windows_D
        return self.pages_SN[slots_B, :width], self.windows_SN[slots_B, :width]


def _draws_on_device(row: Row) -> bool:
    """Return whether the row needs no answer of the host between its forward pass and the next step."""
    if (row.scores is not None and row.scores.targets) or row.drafts or row.arrivals:
        return False
    return row.sampling_state is None or row.sampling_state.bare


def _land(launched: "Future[LaunchedStep | list[Drawn]]") -> list[Drawn]:
    found = launched.result()
    return found.land() if isinstance(found, LaunchedStep) else found


def _aligned_bytes(array: Ints) -> int:
    return -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
