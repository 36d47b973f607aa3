"""Convert the integers of a step to tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from tidemill.workers.execution.step import Row, Step
from tidemill.workers.models.inputs import Inputs


def inputs_of(step: Step, tokens: list[int], page_tokens: int) -> Inputs:
    """Return the inputs of `step`. Each page table holds just the pages that its row's tokens reach. `tokens`
    are those of all rows."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for row in step:
        starts.append(starts[-1] + len(row.tokens))
    states = max(1, *(len(row.writes) for row in step))
    width = 1 << (states - 1).bit_length()  # a device compiles its kernels for each width
    return Inputs(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor([position for row in step for position in range(row.start, row.end)]),
        cu_B1=int32(starts),
        pages_BN=_tables([row.pages[: -(-row.end // page_tokens)] for row in step]),
        windows_BN=_tables([row.windows[: -(-row.end // page_tokens)] for row in step]),
        lens_B=int32([row.end for row in step]),
        read_B=int32([-1 if row.read is None else row.read for row in step]),
        writes_BK=torch.tensor([_right(row, width) for row in step], dtype=torch.int32),
    )


def _tables(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tables as rows of an int32 tensor, padded with zeros."""
    tables_BN = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for index, table in enumerate(tables):
        tables_BN[index, : len(table)] = table
    return torch.as_tensor(tables_BN)


def _right(row: Row, width: int) -> tuple[int, ...]:
    return (*[-1] * (width - len(row.writes)), *row.writes)
