"""Carries out steps with a real model, on one thread beside the event loop.

On a device a step has its own stream, and has ended when the device has: what lands is there for whoever
copies pages, and what is given back is used by nobody any more.
"""

import asyncio
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from tidemill.workers.device import HOST
from tidemill.workers.graphs import Capture, Graphs, cuda_capture, padding, shapes
from tidemill.workers.inputs import Caches, Inputs, on_device
from tidemill.workers.logprobs import scores_of
from tidemill.workers.messages import TokenLogprob
from tidemill.workers.models.registry import Model
from tidemill.workers.sampling import draw
from tidemill.workers.step import PENDING, Drawn, Row, Step

Outputs: TypeAlias = tuple[torch.Tensor | None, list[tuple[TokenLogprob, ...]]]
"""Logits of the rows that draw, and the scores of all rows: see `outputs_of`."""


class TorchRunner:
    def __init__(
        self,
        model: Model,
        caches: Caches,
        page_tokens: int,
        threads: int,
        device: torch.device = HOST,
    ) -> None:
        """Weights and caches lie on `device`."""
        self._model = model
        self._caches = caches
        self._page_tokens = page_tokens
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs: Graphs | None = None
        self._last: dict[str, int] = {}  # the token that each row of the step before drew
        # OpenMP keeps the number of threads per calling thread, so it is set where the steps run.
        self._thread = ThreadPoolExecutor(1, "step", torch.set_num_threads, (threads,))

    def warm_up(self, rows_max: int, tokens_max: int) -> None:
        """Run steps of padding, before the first step: kernels are compiled then, and there is memory for the
        largest."""
        self._thread.submit(self._warm_up, rows_max, tokens_max).result()

    def use_graphs(self, rows_max: int, table_width: int, capture: Capture | None = None) -> None:
        """Capture graphs for decode steps, which run as such from now on; before the first step. `capture`:
        None is that of CUDA."""
        self._thread.submit(self._capture, rows_max, table_width, capture).result()

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self.run_now, step)

    def run_now(self, step: Step) -> list[Drawn]:
        last, self._last = self._last, {}
        with torch.inference_mode(), self._on_stream():
            logits_NV, scores = self._outputs(step, self._tokens(step, last))
            found = [Drawn()] * len(step)
            if logits_NV is not None:
                drawn = iter(draw(logits_NV, [row for row in step if row.draws is not None]))
                found = [Drawn() if row.draws is None else next(drawn) for row in step]
            if scores:
                found = [one._replace(scores=some) for one, some in zip(found, scores, strict=True)]
        self._last = {
            row.sequence_id: one.tokens[-1] for row, one in zip(step, found, strict=True) if one.tokens
        }
        return found

    def _tokens(self, step: Step, last: Mapping[str, int]) -> list[int]:
        """The tokens of the step, with those that the step before drew: a group tells them its ranks."""
        return [last[row.sequence_id] if token == PENDING else token for row in step for token in row.tokens]

    def _outputs(self, step: Step, tokens: list[int]) -> Outputs:
        """What all ranks of a group do together."""
        return outputs_of(self._model, self._hidden(inputs_of(step, tokens, self._page_tokens)), step)

    def _hidden(self, inputs: Inputs) -> torch.Tensor:
        hidden_TH = None if self._graphs is None else self._graphs.forward(inputs)
        if hidden_TH is None:
            return self._model.forward(on_device(inputs, self._device), self._caches)
        return hidden_TH

    @contextmanager
    def _on_stream(self) -> Generator[None]:
        """Whatever is started in it has ended after it, also when it raises."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def _warm_up(self, rows_max: int, tokens_max: int) -> None:
        for rows, first in shapes(rows_max, tokens_max):
            with torch.inference_mode(), self._on_stream():
                self._hidden(padding(rows, 1, first))

    def _capture(self, rows_max: int, table_width: int, capture: Capture | None) -> None:
        if capture is None:
            assert self._stream is not None
            capture = cuda_capture(self._stream)
        with torch.inference_mode(), self._on_stream():
            self._graphs = Graphs(
                lambda inputs: self._model.forward(inputs, self._caches),
                rows_max,
                table_width,
                self._device,
                capture,
            )

    def close(self) -> None:
        """End the thread, when its step has ended."""
        self._thread.shutdown()
        self._graphs = None


def outputs_of(model: Model, hidden_TH: torch.Tensor, step: Step) -> Outputs:
    """`logits_of`, and what rows are to say of their prompts: logprobs.scores_of."""
    return logits_of(model, hidden_TH, step), scores_of(model.logits, hidden_TH, step)


def logits_of(model: Model, hidden_TH: torch.Tensor, step: Step) -> torch.Tensor | None:
    """Logits `[N, vocabulary]` from the hidden states of a step, `1 + drafts` of each row that draws. None
    when no row does."""
    places: list[int] = []
    end = 0
    for row in step:
        end += len(row.tokens)
        if row.draws is not None:
            places += range(end - row.drafts - 1, end)
    if len(places) == end:
        return model.logits(hidden_TH)
    if not places:
        return None
    places_N = torch.tensor(places, pin_memory=hidden_TH.is_cuda).to(hidden_TH.device, non_blocking=True)
    return model.logits(hidden_TH[places_N])


def inputs_of(step: Step, tokens: list[int], page_tokens: int) -> Inputs:
    """The integers of `step` as tensors; each page table holds just the pages that its row's tokens reach.
    `tokens` are those of all rows."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for row in step:
        starts.append(starts[-1] + len(row.tokens))
    tables = [row.pages[: -(-row.end // page_tokens)] for row in step]
    pages_BN = np.zeros((len(step), max(map(len, tables))), np.int32)
    for index, table in enumerate(tables):
        pages_BN[index, : len(table)] = table
    states = max(1, *(len(row.writes) for row in step))
    return Inputs(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor([position for row in step for position in range(row.start, row.end)]),
        cu_B1=int32(starts),
        pages_BN=torch.as_tensor(pages_BN),
        lens_B=int32([row.end for row in step]),
        read_B=int32([-1 if row.read is None else row.read for row in step]),
        writes_BK=torch.tensor([_right(row, states) for row in step], dtype=torch.int32),
    )


def _right(row: Row, width: int) -> tuple[int, ...]:
    return (*[-1] * (width - len(row.writes)), *row.writes)
