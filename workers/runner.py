"""Carries out steps with a real model, on one thread beside the event loop."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from tidemill.workers.inputs import Caches, Inputs
from tidemill.workers.models.registry import Model
from tidemill.workers.sampling import draw
from tidemill.workers.step import PENDING, Drawn, Row, Step


class TorchRunner:
    def __init__(self, model: Model, caches: Caches, page_tokens: int, threads: int) -> None:
        self._model = model
        self._caches = caches
        self._page_tokens = page_tokens
        self._last: dict[str, int] = {}  # the token that each row of the step before drew
        # OpenMP keeps the number of threads per calling thread, so it is set where the steps run.
        self._thread = ThreadPoolExecutor(1, "step", torch.set_num_threads, (threads,))

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self.run_now, step)

    def run_now(self, step: Step) -> list[Drawn]:
        last, self._last = self._last, {}
        with torch.inference_mode():
            logits_NV = self._logits(step, self._tokens(step, last))
            if logits_NV is None:
                return [Drawn()] * len(step)
            drawn = iter(draw(logits_NV, [row for row in step if row.draws is not None]))
            found = [Drawn() if row.draws is None else next(drawn) for row in step]
        self._last = {
            row.sequence_id: one.tokens[-1] for row, one in zip(step, found, strict=True) if one.tokens
        }
        return found

    def _tokens(self, step: Step, last: Mapping[str, int]) -> list[int]:
        """The tokens of the step, with those that the step before drew: a group tells them its ranks."""
        return [last[row.sequence_id] if token == PENDING else token for row in step for token in row.tokens]

    def _logits(self, step: Step, tokens: list[int]) -> torch.Tensor | None:
        """What all ranks of a group do together."""
        return logits_of(self._model, self._caches, inputs_of(step, tokens, self._page_tokens), step)

    def close(self) -> None:
        """End the thread, when its step has ended."""
        self._thread.shutdown()


def logits_of(model: Model, caches: Caches, inputs: Inputs, step: Step) -> torch.Tensor | None:
    """Run the step; logits `[N, vocabulary]`, `1 + drafts` of each row that draws. None when no row does."""
    hidden_TH = model.forward(inputs, caches)
    places: list[int] = []
    end = 0
    for row in step:
        end += len(row.tokens)
        if row.draws is not None:
            places += range(end - row.drafts - 1, end)
    return model.logits(hidden_TH[torch.tensor(places)]) if places else None


def inputs_of(step: Step, tokens: list[int], page_tokens: int) -> Inputs:
    """The integers of `step` as tensors; each page table holds just the pages that its row's tokens reach.
    `tokens` are those of all rows."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for row in step:
        starts.append(starts[-1] + len(row.tokens))
    tables = [row.pages[: -(-row.end // page_tokens)] for row in step]
    width = max(map(len, tables))
    states = max(1, *(len(row.writes) for row in step))
    return Inputs(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor([position for row in step for position in range(row.start, row.end)]),
        cu_B1=int32(starts),
        pages_BN=torch.tensor([(*table, *[0] * (width - len(table))) for table in tables], dtype=torch.int32),
        lens_B=int32([row.end for row in step]),
        read_B=int32([-1 if row.read is None else row.read for row in step]),
        writes_BK=torch.tensor([_right(row, states) for row in step], dtype=torch.int32),
    )


def _right(row: Row, width: int) -> tuple[int, ...]:
    return (*[-1] * (width - len(row.writes)), *row.writes)
