"""`embed` on CUDA: torch's, once a step."""

import torch
from torch.nn import functional

from tidemill.kernels.linear.stored import Stored


def embed(tokens_T: torch.Tensor, weight: Stored) -> torch.Tensor:
    """Look up rows, in the dtype of the weights, of codes in bfloat16."""
    return weight.moved(lambda rows: functional.embedding(tokens_T, rows)).factors("bfloat16")
