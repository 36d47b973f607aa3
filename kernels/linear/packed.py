"""Weights of a linear layer as its operator wants them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights `[.., out, in]` in the order of the variant that packed them; leading dimensions are experts,
    or heads.

    data    the weights, bfloat16 if they came so, else float32 (of a reference, whatever they were); only
            operators of the same variant understand their order
    bias_N  [.., out] or None
    """

    data: torch.Tensor
    bias_N: torch.Tensor | None
    out_features: int
    in_features: int

    @property
    def is_half(self) -> bool:
        return self.data.dtype == torch.bfloat16
