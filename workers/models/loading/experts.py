"""The tensors of the routed experts of a layer, in the forms that folders have."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, assert_never

import torch

from tidemill.kernels.linear.stored import Stored, join, stack
from tidemill.workers.models.loading.sharding import EvenRuns, OneRank
from tidemill.workers.models.loading.weights import Weight, projection_back

Form: TypeAlias = Literal["separate", "stacked", "woven"]


class ExpertMatrices(NamedTuple):
    """Matrices of E experts: `gate_up` [E, 2 I, H], gate first, and `down` [E, H, I]; biases of rows."""

    gate_up: Stored
    down: Stored
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """`count` experts of width `inner`.

    separate    gate_proj, up_proj and down_proj of each expert, under `into`.N.
    stacked     `into` [E, 2 I, H], gate first, and `back` [E, H, I]
    woven       the same with gate and up interleaved, floats transposed, and both with biases
    """

    form: Form
    count: int
    inner: int
    into: str
    back: str

    def weights(self, hidden: int) -> dict[str, Weight]:
        """Return the tensors by name, and how ranks share them."""
        match self.form:
            case "separate":
                into = Weight((self.inner, hidden), EvenRuns())
                one = {"gate_proj": into, "up_proj": into, "down_proj": projection_back(hidden, self.inner)}
                return {
                    f"{prefix}{name}.weight": replace(weight, by_expert=OneRank(expert, self.count))
                    for expert, prefix in enumerate(self._prefixes)
                    for name, weight in one.items()
                }
            case "stacked":
                into, back = (self.count, 2 * self.inner, hidden), (self.count, hidden, self.inner)
                return {
                    self.into: Weight(into, EvenRuns(runs=2, dim=1), by_expert=EvenRuns()),
                    self.back: Weight(back, EvenRuns(dim=1), EvenRuns(dim=2), EvenRuns()),
                }
            case "woven":
                into, back = (self.count, 2 * self.inner, hidden), (self.count, hidden, self.inner)
                pairs, rows, experts, once = (
                    EvenRuns(dim=1, step=2),
                    EvenRuns(dim=1),
                    EvenRuns(),
                    OneRank(zeros=True),
                )
                return {
                    self.into: Weight(into, pairs, by_expert=experts, transposed=True),
                    f"{self.into}_bias": Weight(into[:2], pairs, by_expert=experts),
                    self.back: Weight(back, rows, EvenRuns(dim=2), experts, transposed=True),
                    f"{self.back}_bias": Weight(back[:2], rows, once, experts),
                }
            case _:
                assert_never(self.form)

    def read(self, read: Callable[[str], Stored], own: tuple[int, int] | None) -> ExpertMatrices:
        """Return the experts of this rank, which has those of the half-open range `own` whole."""
        match self.form:
            case "separate":
                first, end = own or (0, self.count)
                # All are read, since their bytes are in the fingerprint; of other ranks' experts none comes.
                gate_up = [
                    join([read(f"{name}gate_proj.weight"), read(f"{name}up_proj.weight")])
                    for name in self._prefixes
                ]
                down = [read(f"{name}down_proj.weight") for name in self._prefixes]
                return ExpertMatrices(stack(gate_up[first:end]), stack(down[first:end]))
            case "stacked":
                return ExpertMatrices(read(self.into), read(self.back))
            case "woven":
                return ExpertMatrices(
                    read(self.into).moved(_unwoven),
                    read(self.back),
                    _unwoven(read(f"{self.into}_bias").values),
                    read(f"{self.back}_bias").values,
                )
            case _:
                assert_never(self.form)

    @property
    def _prefixes(self) -> list[str]:
        return [f"{self.into}.{expert}." for expert in range(self.count)]


def _unwoven(interleaved: torch.Tensor) -> torch.Tensor:
    """Reorder interleaved gate and up of each expert to all of gate, then all of up."""
    return torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], dim=1)
