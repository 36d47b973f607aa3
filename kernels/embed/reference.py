"""The definition of `embed`."""

import torch
from torch.nn import functional

from tidemill.kernels.linear.stored import Stored


def embed(tokens_T: torch.Tensor, weight: Stored) -> torch.Tensor:
    """The values of the rows of the tokens, int64, `[T, H]`, at least float32."""
    rows_TH = weight.moved(lambda rows: functional.embedding(tokens_T, rows)).values
    return rows_TH.to(torch.promote_types(rows_TH.dtype, torch.float32))
