"""The data that layers share in one step, and the protocols of their configs and of loaded layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.shared.rows import Made
from tidemill.kvstore.layout import LayerSpec
from tidemill.workers.models.collectives import Ranks
from tidemill.workers.models.inputs import Inputs, Kept
from tidemill.workers.models.layers.rope import Rope
from tidemill.workers.models.loading.sharding import RankPart
from tidemill.workers.models.loading.weights import Weight

Read: TypeAlias = Callable[[str], Stored]
"""Returns this rank's part of the tensor of that name, as it is stored."""

Cache: TypeAlias = tuple[Any, ...]
"""The cache of one layer: (pages of keys and values or of latents), or (convolution, temporal); see
inputs.Caches."""


@dataclass(frozen=True, slots=True)
class Work:
    """The data of a step that layers share. `windows` is the step as layers with a window see it; `angles`
    are cos and sin of its positions.

    sums            a layer returns this rank's terms of its output, which ranks add up; else some columns
    expert_pairs_R  int64, counts pairs of a token and one of its experts by the rank that has that expert;
                    None: nothing is counted
    kept            the tokens that a mixer returns; None: all
    made            what operators have made of the rows of those tokens
    """

    ops: Operators
    ranks: Ranks
    epsilon: float
    inputs: Inputs
    windows: Inputs
    angles: Mapping[Rope | None, torch.Tensor]
    sums: bool = False
    expert_pairs_R: torch.Tensor | None = None
    kept: Kept | None = None
    made: Made = field(default_factory=dict[object, torch.Tensor])

    def of_kept(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens that are kept."""
        return x_T if self.kept is None else x_T.index_select(0, self.kept.tokens_K)

    def seen(self, inputs: Inputs) -> Inputs:
        """Return the step whose tokens are those that are kept."""
        return inputs if self.kept is None else self.kept.of(inputs)

    def project_out(self, x_TI: torch.Tensor, out: Packed) -> torch.Tensor:
        """Project the columns of all ranks to this rank's columns, or its own columns to its terms."""
        return self.ops.linear(x_TI if self.sums else self.ranks.gather(x_TI, out.in_features), out)

    def own_columns(self, whole_TI: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns, packed, of those of all ranks, which share them evenly."""
        return whole_TI.chunk(self.ranks.size, dim=1)[self.ranks.index].contiguous()


class Mixer(Protocol):
    """Mixes the tokens of each sequence."""

    def run(self, h_TH: torch.Tensor, work: Work, cache: Cache) -> torch.Tensor:
        """Return this rank's columns of the layer's output, `[T, hidden / ranks]`, or its terms, `[T,
        hidden]`, of the tokens that are kept; update `cache` for all."""
        ...


class Mlp(Protocol):
    """Computes each token alone."""

    def run(self, h_TH: torch.Tensor, work: Work) -> torch.Tensor:
        """Return this rank's columns of the layer's output, `[T, hidden / ranks]`, or its terms."""
        ...


class MixerConfig(Protocol):
    """All that determines the output of a mixer except its weights; plain frozen data."""

    @property
    def spec(self) -> LayerSpec: ...
    @property
    def rope(self) -> Rope | None: ...

    def heads(self) -> dict[str, int]:
        """Return its numbers of heads by kind; a rank has a share of each."""
        ...

    def weights(self, hidden: int) -> dict[str, Weight]:
        """Return its tensors by the name after `model.layers.N.`."""
        ...

    def context_flops(self) -> float:
        """The FLOPs of a token per earlier token."""
        ...

    def part(self, spec: LayerSpec, size: int) -> Self:
        """Return the part of one of `size` ranks, whose cache is `spec`."""
        ...

    def load(self, read: Read, ops: Operators) -> Mixer: ...


class MlpConfig(Protocol):
    """The same for an MLP: see MixerConfig."""

    def weights(self, hidden: int) -> dict[str, Weight]: ...

    def token_flops(self, hidden: int) -> float: ...

    def part(self, rank: RankPart) -> Self:
        """Raises ModelError where ranks cannot share it."""
        ...

    def load(self, read: Read, ops: Operators) -> Mlp: ...


def norm_weight(weight: Stored, offset: float) -> torch.Tensor:
    """Return the weight in float32; some checkpoints store the difference from `offset`."""
    return offset + weight.values.float()


def matrix_flops(weights: Mapping[str, Weight]) -> float:
    """Return the FLOPs of a token that uses each of these matrices: two for each element."""
    return sum(
        2.0 * weight.shape[0] * weight.shape[1] for weight in weights.values() if len(weight.shape) == 2
    )
