"""Weights of a linear layer as its operator wants them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tidemill.kernels.linear.stored import Kind, Stored, runs


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights `[.., out, in]` in the order of the variant that packed them; leading dimensions are experts,
    or heads.

    data    the weights, bfloat16 if they came so, else float32 (of a reference, whatever they were), or
            codes; only operators of the same variant understand their order
    bias_N  [.., out] or None
    rounds  x is rounded to bfloat16; of weights alone that are bfloat16, or become so
    kind    of the weights, as they are kept
    scales  of codes, in the order of the variant; `offsets` likewise, or None
    format  a number by which the C++ operators know what `data` is: of codes, their scales beside them
    rest    the outputs that follow, of other kinds; `linear` and `logits` alone take it
    """

    data: torch.Tensor
    bias_N: torch.Tensor | None
    out_features: int
    in_features: int
    rounds: bool = False
    kind: Kind = "float32"
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    format: int = 0
    rest: "Packed | None" = None

    @property
    def segments(self) -> "list[Packed]":
        """The weights of one kind, in the order of their outputs."""
        return [self] if self.rest is None else [self, *self.rest.segments]

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the product takes it, in its own type."""
        return x.bfloat16().to(x.dtype) if self.rounds else x


def in_segments(
    parts: Sequence[Stored],
    bias_N: torch.Tensor | None,
    pack: Callable[[Stored, torch.Tensor | None], Packed],
) -> Packed:
    """Pack neighbours of one kind together, each run with its part of the bias `[.., N]`."""
    found, end = None, sum(part.codes.shape[-2] for part in parts)
    for run in reversed(list(runs(parts))):
        start = end - run.codes.shape[-2]
        bias = None if bias_N is None else bias_N[..., start:end]
        found, end = replace(pack(run, bias), rest=found), start
    assert found is not None
    return found
