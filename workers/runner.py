"""Carries out steps with a real model, on one thread beside the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from tidemill.workers.inputs import Caches, Inputs
from tidemill.workers.models.registry import Model
from tidemill.workers.sampling import draw
from tidemill.workers.step import Row, Step


class TorchRunner:
    def __init__(self, model: Model, caches: Caches, page_tokens: int, threads: int) -> None:
        self._model = model
        self._caches = caches
        self._page_tokens = page_tokens
        # OpenMP keeps the number of threads per calling thread, so it is set where the steps run.
        self._thread = ThreadPoolExecutor(1, "step", torch.set_num_threads, (threads,))

    async def run(self, step: Step) -> list[int | None]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.run_now, step)

    def run_now(self, step: Step) -> list[int | None]:
        """The drawn token of each row, None for rows that draw nothing."""
        with torch.inference_mode():
            inputs = inputs_of(step, self._page_tokens)
            hidden_TH = self._model.forward(inputs, self._caches)
            drawing = [index for index, row in enumerate(step) if row.sampling is not None]
            drawn: list[int | None] = [None] * len(step)
            if drawing:
                last_N = inputs.cu_B1[1:][drawing].long() - 1
                tokens = draw(
                    self._model.logits(hidden_TH[last_N]),
                    [row.sampling for row in step if row.sampling is not None],
                    [row.start + len(row.tokens) for row in step if row.sampling is not None],
                )
                for index, token in zip(drawing, tokens, strict=True):
                    drawn[index] = token
            return drawn


def inputs_of(step: Step, page_tokens: int) -> Inputs:
    """The integers of `step` as tensors; each page table holds just the pages that its row's tokens reach."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for row in step:
        starts.append(starts[-1] + len(row.tokens))
    tables = [row.pages[: -(-_end(row) // page_tokens)] for row in step]
    width = max(map(len, tables))
    return Inputs(
        tokens_T=torch.tensor([token for row in step for token in row.tokens]),
        positions_T=torch.tensor([position for row in step for position in range(row.start, _end(row))]),
        cu_B1=int32(starts),
        pages_BN=torch.tensor([(*table, *[0] * (width - len(table))) for table in tables], dtype=torch.int32),
        lens_B=int32([_end(row) for row in step]),
        read_B=int32([-1 if row.read is None else row.read for row in step]),
        write_B=int32([-1 if row.write is None else row.write for row in step]),
    )


def _end(row: Row) -> int:
    return row.start + len(row.tokens)
