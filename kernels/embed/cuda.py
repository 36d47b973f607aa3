"""`embed` on CUDA: torch's, once a step."""

import torch
from torch.nn import functional


def embed(tokens_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Look up rows, in the dtype of the weights."""
    return functional.embedding(tokens_T, weight_VH)
