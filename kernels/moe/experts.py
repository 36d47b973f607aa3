"""The routed experts of one layer."""

from dataclasses import dataclass

from tidemill.kernels.linear.packed import Packed


@dataclass(frozen=True, slots=True)
class Experts:
    """E experts of width I, or one rank's slices of them; each token runs `top_k`.

    gate_up     [E, 2 I, H], gate first; a slice has the same columns of gate and of up
    down        [E, H, I]; a slice has fewer rows, never fewer columns: no sum is split over ranks
    renormalise  the weights of a token's experts sum to 1
    """

    gate_up: Packed
    down: Packed
    top_k: int
    renormalise: bool
