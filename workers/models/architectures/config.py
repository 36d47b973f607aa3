"""The parts of a model, for all architectures. Weights, shares and costs follow from this data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kvstore.layout import LayerSpec
from tidemill.kvstore.memory.recompute_cost import RecomputeCost
from tidemill.kvstore.shards import rank_layers
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.layers.moe import MoeConfig
from tidemill.workers.models.layers.work import MixerConfig, MlpConfig, matrix_flops
from tidemill.workers.models.loading.config_json import Raw, number, size
from tidemill.workers.models.loading.sharding import EvenRuns, RankPart, Replicated
from tidemill.workers.models.loading.weights import Weight

HEAD = "lm_head.weight"
"""The tensor that makes logits, unless it is that of the embedding."""

DRAFT = "mtp."
"""The prefix of the names of all tensors of a prediction head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    mixer: MixerConfig
    mlp: MlpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureConfig:
    """All that determines the model's output except its weights. Its name is in the fingerprint of the
    model.

    head            the tensor that makes logits, unless it is the embedding (`tied`); empty: there are none
    labels          the rows of it that make logits, on every rank; (): all, which ranks share
    draft           the layer of a prediction head (mtp.py); None: there is none, or it is not used
    prefix          of all tensors except the head
    norm_offset     norms store their difference from it
    *_scale         factors of the embedding, of the output of each layer, and of the logits
    """

    layers: tuple[LayerConfig, ...]
    vocab_size: int
    hidden: int
    epsilon: float
    tied: bool
    max_length: int
    head: str = HEAD
    labels: tuple[int, ...] = ()
    draft: LayerConfig | None = None
    prefix: str = "model."
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @property
    def every_layer(self) -> tuple[LayerConfig, ...]:
        """All layers; that of the prediction head is the last."""
        return self.layers if self.draft is None else (*self.layers, self.draft)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.mixer.spec for layer in self.every_layer)


def config_of(raw: Raw, layers: Iterable[LayerConfig], epsilon: float = 1e-6) -> ArchitectureConfig:
    """Return a config with the values that all families name alike. `epsilon` applies where config.json has
    none. Raises ModelError."""
    return ArchitectureConfig(
        layers=tuple(layers),
        vocab_size=size(raw, "vocab_size"),
        hidden=size(raw, "hidden_size"),
        epsilon=number(raw, "rms_norm_eps", epsilon),
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_length=size(raw, "max_position_embeddings"),
    )


def stacked(mixers: Iterable[MixerConfig], mlps: Iterable[MlpConfig]) -> Iterator[LayerConfig]:
    """Yield a layer for each mixer and MLP."""
    return (LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True))


def weights_of(config: ArchitectureConfig) -> dict[str, Weight]:
    """Return every tensor of the checkpoint by name: shape, and cut for tensor parallelism.

    Projections into heads and inner columns give a rank its heads and columns. Projections back into the
    hidden width give it some of those columns, over the full input; or, where ranks add up, all of them, over
    its own input.
    """
    rows = Weight((config.vocab_size, config.hidden), EvenRuns(), role="vocabulary")
    norm = Weight((config.hidden,), Replicated())
    found = {f"{config.prefix}embed_tokens.weight": rows, f"{config.prefix}norm.weight": norm}
    if config.head == HEAD and not config.tied and not config.labels:
        found[HEAD] = rows
    for index, layer in enumerate(config.layers):
        found |= _layer_weights(layer, f"{config.prefix}layers.{index}.", config.hidden)
    if config.draft is not None:
        found |= _layer_weights(config.draft, f"{DRAFT}layers.0.", config.hidden)
        found[f"{DRAFT}fc.weight"] = Weight((config.hidden, 2 * config.hidden), EvenRuns())
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            found[f"{DRAFT}{name}.weight"] = norm
    return found


def weight_bytes(config: ArchitectureConfig, compute_dtype: ComputeDtype) -> int:
    """Return the size of the weights on a device, as if vectors had the type of products, too."""
    count = sum(prod(weight.shape) for weight in weights_of(config).values())
    return count * (2 if compute_dtype == "bfloat16" else 4)


def _layer_weights(layer: LayerConfig, prefix: str, hidden: int) -> dict[str, Weight]:
    norm = Weight((hidden,), Replicated())
    found = layer.mixer.weights(hidden) | layer.mlp.weights(hidden)
    found |= {"input_layernorm.weight": norm, "post_attention_layernorm.weight": norm}
    return {prefix + name: weight for name, weight in found.items()}


def sizes(config: ArchitectureConfig) -> tuple[int, ...]:
    """Return the sizes of groups that can run this model: heads of every kind can be divided, or copied
    evenly."""
    most = max(max(layer.mixer.heads().values()) for layer in config.every_layer)
    return tuple(size for size in range(1, most + 1) if _divides(config, size))


def local(config: ArchitectureConfig, rank: RankPart) -> ArchitectureConfig:
    """Return the config with the heads and the experts that a rank has; all other widths are of the whole.

    Raises ModelError that names the sizes that work.
    """
    size = rank.size
    if not _divides(config, size):
        kinds = {kind: count for layer in config.every_layer for kind, count in layer.mixer.heads().items()}
        heads = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise ModelError(
            f"{size} ranks cannot divide the heads of this model ({heads}): "
            f"set --tensor-parallel-size to {' or '.join(map(str, sizes(config)))}"
        )
    if rank.by_expert and not any(isinstance(layer.mlp, MoeConfig) for layer in config.every_layer):
        raise ModelError("this model has no experts: leave out --enable-expert-parallel")
    specs, count = rank_layers(config.specs, size), len(config.layers)
    own = tuple(
        replace(layer, mixer=layer.mixer.part(spec, size), mlp=layer.mlp.part(rank))
        for layer, spec in zip(config.every_layer, specs, strict=True)
    )
    return replace(config, layers=own[:count], draft=None if config.draft is None else own[count])


def cost(config: ArchitectureConfig) -> RecomputeCost:
    """Return the FLOPs of a forward pass: two per weight that a token uses, and attention to earlier
    tokens."""
    return RecomputeCost(
        token_flops=2.0 * config.vocab_size * config.hidden + sum(_token_flops(config)),
        context_flops=sum(layer.mixer.context_flops() for layer in config.every_layer),
    )


def _token_flops(config: ArchitectureConfig) -> Iterator[float]:
    for layer in config.every_layer:
        yield matrix_flops(layer.mixer.weights(config.hidden))
        yield layer.mlp.token_flops(config.hidden)


def _divides(config: ArchitectureConfig, size: int) -> bool:
    try:
        rank_layers(config.specs, size)
    except ValueError:
        return False
    return not any(layer.mixer.heads().get("query", size) % size for layer in config.every_layer)
