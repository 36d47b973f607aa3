"""Run steps with a real model, on one thread beside the event loop.

On a device a step has its own stream, and has ended when the device has. So pages of a landed step are
complete when they are copied, and freed memory is no longer used.
"""

import asyncio
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tidemill.kernels.precompile import compile_ahead
from tidemill.kvstore.memory.backing import Event
from tidemill.workers.device import HOST
from tidemill.workers.execution.cuda_graphs import (
    Capture,
    GraphDraws,
    Graphs,
    GraphShape,
    cuda_capture,
    padding,
    shapes,
)
from tidemill.workers.execution.logprobs import scores_of
from tidemill.workers.execution.mtp_drafter import MtpDrafter, ends_of
from tidemill.workers.execution.recorded_steps import RecordedSteps
from tidemill.workers.execution.sampler import Sampler, moved, plain_draws
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Drawn, Row, Step
from tidemill.workers.execution.step_tensors import copies_of, inputs_of, kept_of
from tidemill.workers.messages import Request, Sampling, TokenLogprob
from tidemill.workers.models.architectures.registry import Model
from tidemill.workers.models.collectives import ALONE, Ranks
from tidemill.workers.models.inputs import Caches, Inputs, Kept, on_device

FILTERED = Sampling(temperature=1.0, top_k=1000, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=0)
"""The sampling whose draws need the most memory, for the warm-up."""


def _own_clock() -> int:
    return time.pthread_getcpuclockid(threading.get_ident())


Arrivals = Sequence[Sequence[Future[None]]]
"""The arrivals of rows whose pages are being fetched, each with one for every slice."""


class Outputs(NamedTuple):
    """The hidden states of a step, the logits of the rows that draw, and the scores of all rows. `tokens_N`
    (int64) are drawn from the logits, if a graph did it."""

    hidden_TH: torch.Tensor
    logits_NV: torch.Tensor
    scores: list[tuple[TokenLogprob, ...]]
    tokens_N: torch.Tensor | None = None


class TorchRunner:
    _ranks: Ranks = ALONE  # in a group, those of its model

    def __init__(
        self,
        model: Model,
        caches: Caches,
        page_tokens: int,
        threads: int,
        device: torch.device = HOST,
        guesser: MtpDrafter | None = None,
    ) -> None:
        """Create a runner. Weights and caches lie on `device`."""
        self._sampler = Sampler(model.ops, device)
        self._model = model
        self._caches = caches
        self._page_tokens = page_tokens
        self._device = device
        self._guesser = guesser
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.newest_step: Event | None = None  # its end, after which nothing reads freed memory
        self._graphs: Graphs | RecordedSteps | None = None
        # The token that each row of the previous step drew; PENDING: it drew none.
        self._last: dict[str, int] = {}
        self._lost: set[str] = set()  # rows of this step after those: nothing of them counts
        # OpenMP keeps the number of threads per calling thread, so it is set where the steps run.
        self._thread = ThreadPoolExecutor(1, "step", torch.set_num_threads, (threads,))
        self._cpu_clock = self._thread.submit(_own_clock).result() if device.type == "cpu" else None

    def warm_up(self, rows_max: int, tokens_max: int, table_width: int = 1, drafts_max: int = 0) -> None:
        """Run steps of padding, before the first step. It compiles the kernels, and ensures memory for the
        largest step, whose page tables have `table_width` pages."""
        self._thread.submit(self._warm_up, rows_max, tokens_max, table_width, drafts_max).result()

    def compile_ahead(self, processes_max: int, *sizes: int) -> None:
        """Compile what `warm_up` of these sizes launches, on several processes."""
        self._thread.submit(compile_ahead, partial(self._warm_up, *sizes), processes_max).result()

    def use_graphs(
        self, graphs: Iterable[GraphShape], table_width: int, capture: Capture | None = None
    ) -> None:
        """Capture graphs of these shapes, before the first step; steps that fit use them from now on.
        `capture` None: that of CUDA."""
        self._thread.submit(self._capture, graphs, table_width, capture).result()

    def record_steps(self, tokens_max: int, rows_max: int, table_width: int) -> None:
        """Record steps of up to these sizes, before the first one; see RecordedSteps. For a rank alone on a
        CPU."""
        self._thread.submit(self._record, tokens_max, rows_max, table_width).result()

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self.run_now, step)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the thread that runs the steps, also amid a step; 0 with a device, for
        which a thread may wait by polling, and after `close`."""
        return 0.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)

    def run_now(self, step: Step) -> list[Drawn]:
        last, self._last = self._last, {}
        self._lost = {
            row.sequence_id for row in step if PENDING in row.tokens and last.get(row.sequence_id) == PENDING
        }
        with torch.inference_mode(), self._on_stream():
            tokens = self._tokens(step, last)
            outputs = self._outputs(step, tokens)
            found = pooled_of(step, outputs) or self._draw(step, outputs)
            if outputs.scores:
                found = [
                    row_drawn._replace(scores=some)
                    for row_drawn, some in zip(found, outputs.scores, strict=True)
                ]
            if self._guesser is not None:
                guesses = self._guess(self._guesser, step, tokens, outputs.hidden_TH, found)
                found = [
                    row_drawn._replace(guesses=some) for row_drawn, some in zip(found, guesses, strict=True)
                ]
        self._last = {
            row.sequence_id: row_drawn.tokens[-1] if row_drawn.tokens else PENDING
            for row, row_drawn in zip(step, found, strict=True)
            if row_drawn.tokens or row_drawn.late or row_drawn.error is not None
        }
        return found

    def _tokens(self, step: Step, last: Mapping[str, int]) -> list[int]:
        """Return the tokens of the step, with those that the previous step drew. A group sends them to its
        ranks."""
        return [
            max(0, last[row.sequence_id]) if token == PENDING else token
            for row in step
            for token in row.tokens
        ]

    def _draw(self, step: Step, outputs: Outputs) -> list[Drawn]:
        logits_NV = outputs.logits_NV
        rows = [row for row in step if row.sampling_state is not None]
        kept = [row for row in rows if row.sequence_id not in self._lost]
        if len(kept) < len(rows):
            logits_NV = logits_NV[_positions(rows, self._lost)]
        drawn = iter(self._sampler.draw(logits_NV, kept, outputs.tokens_N))
        draws = [row.sampling_state is not None and row.sequence_id not in self._lost for row in step]
        return [next(drawn) if row_draws else Drawn() for row_draws in draws]

    def _guess(
        self, guesser: MtpDrafter, step: Step, tokens: list[int], hidden_TH: torch.Tensor, drawn: list[Drawn]
    ) -> list[tuple[int, ...]]:
        return guesser.run(step, tokens, hidden_TH, ends_of(drawn), self._choose)

    def _choose(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the most likely token of each row, whatever its sampling (measured: decision 25)."""
        return logits_NV.argmax(dim=-1)

    def _share(self, tokens_N: torch.Tensor) -> None:
        """Copy the leader's tokens into those of the other ranks of a group."""
        self._ranks.broadcast(tokens_N)

    def _outputs(self, step: Step, tokens: list[int]) -> Outputs:
        """Compute what all ranks of a group compute together."""
        inputs = inputs_of(step, tokens, self._page_tokens)
        arrivals = [row.arrivals for row in step if row.arrivals]
        end = self._graphs.end_of(inputs) if isinstance(self._graphs, Graphs) and not arrivals else None
        draws_TF = None if end is None or self._lost else plain_draws(step)
        if end is not None and draws_TF is not None:
            end.fill(moved(draws_TF, self._device))
        with self._copied(step):
            hidden_TH = self._hidden(inputs, self._kept(step), arrivals)
        for slices in arrivals:
            slices[-1].result()  # also if the last layers are those of a prediction head
        logits_NV = logits_of(self._model, hidden_TH, step) if end is None else drawing(end.logits_TV, step)
        tokens_N = None if end is None or draws_TF is None else drawing(end.tokens_T, step)
        return Outputs(hidden_TH, logits_NV, scores_of(self._model.logits, hidden_TH, step), tokens_N)

    @contextmanager
    def _copied(self, step: Step) -> Generator[None]:
        """Copy the checkpoints from which rows go on to states before the block, and states to checkpoints
        after it."""
        if not self._caches.saved:
            yield
            return
        restores, saves = (torch.as_tensor(pairs).to(self._device) for pairs in copies_of(step))
        if restores.numel():
            self._caches.restore(*restores)
        yield
        if saves.numel():
            self._save(saves)

    def _save(self, saves_2N: torch.Tensor) -> None:
        """Copy states to checkpoints on all ranks of a group. The leader's step ends after that, so transfers
        on a rank, which do not wait for its steps, read whole checkpoints and write to no state of a copy."""
        self._caches.save(*saves_2N)
        self._ranks.reduce(torch.zeros(1, 1, device=self._device))

    def _kept(self, step: Step) -> Kept | None:
        """Return the tokens of which the last layer computes hidden states, on a device or by a recording.
        None: all, which a prediction head reads."""
        if self._guesser is None and (self._device != HOST or isinstance(self._graphs, RecordedSteps)):
            return kept_of(step)
        return None

    def _hidden(self, inputs: Inputs, kept: Kept | None = None, arrivals: Arrivals = ()) -> torch.Tensor:
        """Return the hidden states of a step whose inputs are in host memory. Nothing reads those that are
        not kept. A layer whose pages are still to arrive is launched when they are here, which holds up the
        host and not what it has launched before."""
        graphs = None if arrivals else self._graphs
        if isinstance(graphs, Graphs) and (hidden_TH := graphs.forward(inputs)) is not None:
            return hidden_TH
        hidden_KH = graphs.forward(inputs, kept) if isinstance(graphs, RecordedSteps) else None
        if hidden_KH is None:
            kept = None if kept is None else kept.on(self._device)
            caches = replace(self._caches, arrivals=arrivals) if arrivals else self._caches
            hidden_KH = self._model.forward(on_device(inputs, self._device), caches, kept)
        if kept is None:
            return hidden_KH
        hidden_TH = hidden_KH.new_empty(len(inputs.tokens_T), hidden_KH.shape[1])
        hidden_TH[kept.tokens_K] = hidden_KH
        return hidden_TH

    @contextmanager
    def _on_stream(self) -> Generator[None]:
        """Run the block on the stream of the step, and wait for what it started, also when it raises."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self.newest_step = self._stream.record_event()
                self._stream.synchronize()

    def _warm_up(self, rows_max: int, tokens_max: int, table_width: int, drafts_max: int) -> None:
        for rows, first, states in shapes(rows_max, tokens_max):
            with torch.inference_mode(), self._on_stream():
                inputs = padding(rows, table_width, first, windows=self._caches.has_windows, states=states)
                hidden_TH = self._hidden(inputs)
                logits_NV = self._model.logits(hidden_TH[: rows * (1 + drafts_max)])
                if rows == rows_max and logits_NV.shape[1]:  # the leader's
                    self._sampler.start(logits_NV[:rows], _filtered_rows(rows))
                for power in range(rows_max.bit_length() if (rows, first) == (rows_max, 1) else 0):
                    self._model.logits(hidden_TH[: 1 << power])  # tiles of a head of codes
                if self._guesser is not None:
                    self._guesser.warm_up(hidden_TH, inputs)

    def _capture(self, graphs: Iterable[GraphShape], table_width: int, capture: Capture | None) -> None:
        if capture is None:
            assert self._stream is not None
            capture = cuda_capture(self._stream)
        graphs = tuple(graphs)
        most = max(shape.rows for shape in graphs if shape.all_draw)
        model, (logits, draw) = self._model, (self._model.logits, self._model.ops.draw)
        with torch.inference_mode(), self._on_stream():
            self._graphs = Graphs(
                lambda inputs: model.forward(inputs, self._caches),
                graphs,
                table_width,
                self._device,
                capture,
                windows=self._caches.has_windows,
                draws=GraphDraws(logits, draw, most, self._device),
            )
            if self._guesser is not None:
                guesses = GraphDraws(logits, draw, most, self._device, share=self._share, keeps_logits=False)
                hidden_TH = self._graphs.most_hidden()
                self._guesser.use_graphs(graphs, table_width, capture, hidden_TH, guesses)

    def _record(self, *sizes: int) -> None:
        with torch.inference_mode():
            self._graphs = RecordedSteps(self._model, self._caches, *sizes)

    def close(self) -> None:
        """End the thread after its step."""
        self._cpu_clock = None  # a thread that has ended has none
        self._thread.shutdown()
        self._graphs = None


def _positions(rows: list[Row], left_out: set[str]) -> list[int]:
    """Return the positions of the logits of `rows`, except of those that are left out."""
    found: list[int] = []
    end = 0
    for row in rows:
        start, end = end, end + row.drafts + 1
        if row.sequence_id not in left_out:
            found += range(start, end)
    return found


def _filtered_rows(count: int) -> tuple[Row, ...]:
    """Return rows of one token that draw with every filter and a penalty."""
    request = Request(request_id="warm-up", tokens=(0,), max_new_tokens=1, sampling=FILTERED)
    return tuple(
        Row(str(index), (0,), 0, (), None, (), sampling_state=SamplingState(request))
        for index in range(count)
    )


def pooled_of(step: Step, outputs: Outputs) -> list[Drawn]:
    """Return what each row pools: the logits of its last token, or the hidden state in a model without. An
    empty list when no row does; all rows of a model pool, or none."""
    pools = [row.sampling_state is not None and row.sampling_state.pools for row in step]
    if not any(pools):
        return []
    has_logits = outputs.logits_NV.shape[1] > 0
    pooled_NC = outputs.logits_NV if has_logits else drawing(outputs.hidden_TH, step)
    rows = iter(pooled_NC.float().cpu().numpy().astype("<f4"))
    return [Drawn(pooled=next(rows).tobytes()) if row_pools else Drawn() for row_pools in pools]


def logits_of(model: Model, hidden_TH: torch.Tensor, step: Step) -> torch.Tensor:
    """Return logits `[N, vocabulary]` from the hidden states of a step, `1 + drafts` for each row that draws;
    `[0, 0]` when no row does."""
    hidden_NH = drawing(hidden_TH, step)
    return model.logits(hidden_NH) if len(hidden_NH) else hidden_NH[:, :0]


def drawing(hidden_TH: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the hidden states `[N, hidden]` behind which tokens are drawn, or what else there is by
    token."""
    positions: list[int] = []
    end = 0
    for row in step:
        end += len(row.tokens)
        if row.sampling_state is not None:
            positions += range(end - row.drafts - 1, end)
    if len(positions) == end or not positions:
        return hidden_TH[: len(positions)]
    positions_N = torch.tensor(positions, pin_memory=hidden_TH.is_cuda)
    return hidden_TH[positions_N.to(hidden_TH.device, non_blocking=True)]
