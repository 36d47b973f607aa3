"""What the layers of a model work with in one step, and how they are loaded and run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kvstore.layout import Attention, Latent, LayerSpec, Linear, Window
from tidemill.workers.models.collectives import Ranks
from tidemill.workers.models.inputs import Inputs
from tidemill.workers.models.layers.rope import Rope
from tidemill.workers.models.loading.weights import Weight

Read: TypeAlias = Callable[[str], torch.Tensor]
"""This rank's part of the tensor of that name."""

Cache: TypeAlias = tuple[torch.Tensor, ...]
"""Of one layer: (keys and values or latents), or (convolution, temporal); see inputs.Caches."""


@dataclass(frozen=True, slots=True)
class Work:
    """`windows` is the step as layers with a window see it; `angles` are cos and sin of its positions."""

    ops: Operators
    ranks: Ranks
    epsilon: float
    inputs: Inputs
    windows: Inputs
    angles: Mapping[Rope | None, torch.Tensor]

    def project_out(self, x_TI: torch.Tensor, out: Packed) -> torch.Tensor:
        """This rank's columns, from those of all ranks."""
        return self.ops.linear(self.ranks.gather(x_TI, out.in_features), out)


class Mixer(Protocol):
    """Mixes the tokens of each sequence."""

    def run(self, h_TH: torch.Tensor, work: Work, cache: Cache) -> torch.Tensor:
        """This rank's columns of what the layer adds, `[T, hidden / ranks]`; updates `cache`."""
        ...


class Mlp(Protocol):
    """Works on each token alone."""

    def run(self, h_TH: torch.Tensor, work: Work) -> torch.Tensor:
        """This rank's columns of what the layer adds, `[T, hidden / ranks]`."""
        ...


class MixerConfig(Protocol):
    """All that decides what a mixer computes besides its weights; plain frozen data."""

    @property
    def spec(self) -> LayerSpec: ...
    @property
    def rope(self) -> Rope | None: ...

    def heads(self) -> dict[str, int]:
        """Its numbers of heads by kind: what a rank has is a share of each."""
        ...

    def weights(self, hidden: int) -> dict[str, Weight]:
        """Its tensors by the name behind `model.layers.N.`."""
        ...

    def context_flops(self) -> float:
        """Of a token per token before it."""
        ...

    def part(self, spec: LayerSpec, size: int) -> Self:
        """What one of `size` ranks computes, whose cache is `spec`."""
        ...

    def load(self, read: Read, ops: Operators) -> Mixer: ...


class MlpConfig(Protocol):
    """As MixerConfig."""

    def weights(self, hidden: int) -> dict[str, Weight]: ...

    def token_flops(self, hidden: int) -> float: ...

    def load(self, read: Read, ops: Operators) -> Mlp: ...


def norm_weight(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """In float32; some checkpoints hold the distance from `offset`."""
    return offset + weight.float()


def matrix_flops(weights: Mapping[str, Weight]) -> float:
    """Of a token that meets each of these matrices: two for each element."""
    return sum(
        2.0 * weight.shape[0] * weight.shape[1] for weight in weights.values() if len(weight.shape) == 2
    )


def is_paged(spec: LayerSpec) -> bool:
    """Whether the layer's cache is of the kind of keys and values, rather than a state."""
    match spec:
        case Attention() | Window() | Latent():
            return True
        case Linear():
            return False
