"""Convert the integers of a step to tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from tidemill.workers.execution.step import Step
from tidemill.workers.models.inputs import Inputs


def inputs_of(step: Step, tokens: list[int], page_tokens: int) -> Inputs:
    """Return the inputs of `step`. Each page table holds just the pages that its row's tokens reach. `tokens`
    are those of all rows."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for row in step:
        starts.append(starts[-1] + len(row.tokens))
    return Inputs(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor([position for row in step for position in range(row.start, row.end)]),
        cu_B1=int32(starts),
        pages_BN=_tables([row.pages[: -(-row.end // page_tokens)] for row in step]),
        windows_BN=_tables([row.windows[: -(-row.end // page_tokens)] for row in step]),
        lens_B=int32([row.end for row in step]),
        read_B=int32([-1 if row.read is None else row.read for row in step]),
        writes_BK=_writes(step),
    )


def _tables(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tables as rows of an int32 tensor, padded with zeros."""
    tables_BN = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for index, table in enumerate(tables):
        tables_BN[index, : len(table)] = table
    return torch.as_tensor(tables_BN)


def _writes(step: Step) -> torch.Tensor:
    """Return the slots for the states after the last tokens of each row, as many as reach all that it
    writes."""
    kept = max((1 + row.end - row.writes[0].depth for row in step if row.writes), default=1)
    writes_BK = np.full((len(step), kept), -1, np.int32)
    for index, row in enumerate(step):
        for depth, state in row.writes:
            writes_BK[index, kept - 1 - (row.end - depth)] = state
    return torch.as_tensor(writes_BK)
