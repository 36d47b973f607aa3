"""A dense MLP: down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.workers.models.layers.work import Read, Work, matrix_flops
from tidemill.workers.models.loading.sharding import EvenRuns
from tidemill.workers.models.loading.weights import Weight


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
        found = into | {self.down: Weight((hidden, self.inner), EvenRuns())}
        named = {f"{self.prefix}{name}.weight": weight for name, weight in found.items()}
        if self.bias:
            named |= {
                f"{self.prefix}{name}.bias": Weight(weight.shape[:1], weight.cut)
                for name, weight in found.items()
            }
        return named

    def token_flops(self, hidden: int) -> float:
        return matrix_flops(self.weights(hidden))

    def load(self, read: Read, ops: Operators) -> "Dense":
        def stacked(kind: str) -> torch.Tensor:
            if self.gate_up is not None:
                return read(f"{self.prefix}{self.gate_up}.{kind}")
            return torch.cat([read(f"{self.prefix}{name}.{kind}") for name in ("gate_proj", "up_proj")])

        down_bias = read(f"{self.prefix}{self.down}.bias") if self.bias else None
        return Dense(
            gate_up=ops.pack(stacked("weight"), stacked("bias") if self.bias else None),
            down=ops.pack(read(f"{self.prefix}{self.down}.weight"), down_bias),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    gate_up: Packed
    down: Packed

    def run(self, h_TH: torch.Tensor, work: Work) -> torch.Tensor:
        return work.project_out(work.ops.linear_silu(h_TH, self.gate_up, self.down), self.down)
