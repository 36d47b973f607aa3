"""Weights of a linear layer as its operator wants them."""

from dataclasses import dataclass

import torch

from tidemill.kernels.linear.stored import CodeKind


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights `[.., out, in]` in the order of the variant that packed them; leading dimensions are experts,
    or heads.

    data      the weights, bfloat16 if they came so, else float32 (of a reference, whatever they were), or
              codes; only operators of the same variant understand their order
    bias_N    [.., out] or None
    rounds    x is rounded to bfloat16; of weights in bfloat16 alone
    kind      of codes, as `Stored` has them; None: the weights are floats
    scales    of codes, in the order of the variant; `offsets` likewise, or None
    segments  rows of several kinds, one below the other, each packed by itself with its part of the bias;
              `data` is then that of the first. Empty: all rows are of one kind
    """

    data: torch.Tensor
    bias_N: torch.Tensor | None
    out_features: int
    in_features: int
    rounds: bool = False
    kind: CodeKind | None = None
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    segments: "tuple[Packed, ...]" = ()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the product takes it, in its own type."""
        return x.bfloat16().to(x.dtype) if self.rounds else x
