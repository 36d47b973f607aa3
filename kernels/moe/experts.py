"""The routed experts of one layer."""

from dataclasses import dataclass
from typing import Literal

from tidemill.kernels.linear.packed import Packed


@dataclass(frozen=True, slots=True)
class Experts:
    """E experts of width I, or one rank's slices of them, or the experts of one rank.

    gate_up     [E, 2 I, H] and its bias [E, 2 I], gate first; a slice has the same columns of gate and of up
    down        [E, H, I] and its bias [E, H]; a slice has fewer rows, or fewer columns where ranks add up
    activation  silu: silu(gate) * up; clamped: (up + 1) * gate * sigmoid(alpha * gate), gate cut off above
                `limit`, and up at both sides (gpt-oss)
    """

    gate_up: Packed
    down: Packed
    activation: Literal["silu", "clamped"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0
