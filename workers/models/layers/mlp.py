"""A dense MLP: down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass
from typing import Self

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.workers.models.layers.work import Read, Work, matrix_flops
from tidemill.workers.models.loading.sharding import EvenRuns, RankPart
from tidemill.workers.models.loading.weights import Weight, bias_back, projection_back


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A dense MLP. `gate_up` is the name of a tensor that has both, one after the other; None: each has its
    own."""

    inner: int
    prefix: str = "mlp."
    gate_up: str | None = None
    down: str = "down_proj"
    bias: bool = False

    def weights(self, hidden: int) -> dict[str, Weight]:
        if self.gate_up is not None:
            into = {self.gate_up: Weight((2 * self.inner, hidden), EvenRuns(runs=2))}
        else:
            into = dict.fromkeys(("gate_proj", "up_proj"), Weight((self.inner, hidden), EvenRuns()))
        found = into | {self.down: projection_back(hidden, self.inner)}
        named = {f"{self.prefix}{name}.weight": weight for name, weight in found.items()}
        if self.bias:
            biases = {name: Weight(weight.shape[:1], weight.cut) for name, weight in into.items()}
            biases[self.down] = bias_back(hidden)
            named |= {f"{self.prefix}{name}.bias": weight for name, weight in biases.items()}
        return named

    def part(self, rank: RankPart) -> Self:
        """Return the same: widths are those of the whole."""
        del rank
        return self

    def token_flops(self, hidden: int) -> float:
        return matrix_flops(self.weights(hidden))

    def load(self, read: Read, ops: Operators) -> "Dense":
        gate_up, down = self.matrices(read)
        gate_up_bias = down_bias = None
        if self.bias:
            gate_up_bias = torch.cat([read(f"{self.prefix}{name}.bias").values for name in self._into])
            down_bias = read(f"{self.prefix}{self.down}.bias").values
        return Dense(gate_up=ops.pack(gate_up, gate_up_bias), down=ops.pack([down], down_bias))

    def matrices(self, read: Read) -> tuple[list[Stored], Stored]:
        """Return gate and up, in one part or two, and down."""
        gate_up = [read(f"{self.prefix}{name}.weight") for name in self._into]
        return gate_up, read(f"{self.prefix}{self.down}.weight")

    @property
    def _into(self) -> tuple[str, ...]:
        return ("gate_proj", "up_proj") if self.gate_up is None else (self.gate_up,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    gate_up: Packed
    down: Packed

    def run(self, h_TH: torch.Tensor, work: Work) -> torch.Tensor:
        return work.project_out(work.ops.linear_silu(h_TH, self.gate_up, self.down), self.down)
