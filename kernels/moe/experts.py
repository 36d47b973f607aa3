"""The routed experts of one layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored, join


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


def with_shared(
    gate_up: Stored, down: Stored, shared_gate_up: Sequence[Stored], shared_down: Stored, count: int
) -> tuple[Stored, Stored]:
    """Return [E + count, 2 I, H] and [E + count, H, I]: an expert that all tokens share, as wide as `count`
    others, becomes these many behind them. Its own parts are [2 count I, H], gate first, and [H, count I]."""
    halves = join(shared_gate_up).moved(
        lambda rows: rows.view(2, count, -1, rows.shape[1]).transpose(0, 1).flatten(1, 2)
    )
    columns = shared_down.moved(lambda rows: rows.view(len(rows), count, -1).transpose(0, 1))
    return join([gate_up, halves], 0), join([down, columns], 0)
