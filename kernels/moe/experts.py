"""The routed experts of one layer."""

from dataclasses import dataclass

from tidemill.kernels.linear.packed import Packed


@dataclass(frozen=True, slots=True)
class Experts:
    """E experts of width I; each token runs `top_k` of them.

    gate_up     [E, 2 I, H], gate first
    down        [E, H, I]
    renormalise  the weights of a token's experts sum to 1
    """

    gate_up: Packed
    down: Packed
    top_k: int
    renormalise: bool
