"""The definition of `embed`."""

import torch
from torch.nn import functional


def embed(tokens_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """The rows of the tokens, int64, `[T, H]`, at least float32."""
    return functional.embedding(tokens_T, weight_VH).to(torch.promote_types(weight_VH.dtype, torch.float32))
