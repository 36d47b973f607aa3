"""The parameters of the heads of a Mamba-2 layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """H = G R heads, in float32: a step of time dt decays a state by exp(-exp(a_log) dt).

    dt_bias_H       added to dt before its softplus
    skip_H          how much of an input goes straight to the output (D)
    dt_min, dt_max  bounds of dt after its softplus
    """

    a_log_H: Tensor
    dt_bias_H: Tensor
    skip_H: Tensor
    dt_min: float
    dt_max: float
