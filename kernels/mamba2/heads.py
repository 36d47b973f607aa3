"""What the heads of a Mamba-2 layer have of their own, beside what their inputs say."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Of H = G R heads, in float32: a step of time dt lets a state decay by exp(-exp(a_log) dt).

    dt_bias_H       added to dt before its softplus
    skip_H          how much of an input goes straight to the output (D)
    dt_min, dt_max  bounds of dt after its softplus
    """

    a_log_H: Tensor
    dt_bias_H: Tensor
    skip_H: Tensor
    dt_min: float
    dt_max: float
