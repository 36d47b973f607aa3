"""Qwen3-Next and Qwen3.5: gated delta rule and gated attention layers, dense or with mixtures of experts."""

from dataclasses import replace
from typing import Literal

from tidemill.kvstore.layout import Linear
from tidemill.workers.models.architectures.config import ArchitectureConfig, LayerConfig, config_of, stacked
from tidemill.workers.models.architectures.qwen3 import attention_of, mlps_of
from tidemill.workers.models.layers.attention import AttentionConfig
from tidemill.workers.models.layers.gated_delta import DeltaConfig
from tidemill.workers.models.layers.moe import MoeConfig
from tidemill.workers.models.layers.rope import rope_of
from tidemill.workers.models.layers.work import MlpConfig
from tidemill.workers.models.loading.config_json import (
    Raw,
    count,
    layer_kinds,
    nested,
    require,
    require_silu,
    size,
)

ROTARY_SHARE = 0.25
ATTENTION_EVERY = 4
NORM_OFFSET = 1.0


def parse(raw: Raw) -> ArchitectureConfig:
    """Return the architecture. Raises ModelError for what is missing or not supported."""
    return _stack(raw, "by head")


def parse_qwen3_5(raw: Raw) -> ArchitectureConfig:
    """Return the architecture of the text part, also for folders of models that see images. Its rotary
    embedding has a position for each of time, height and width, which are equal in a text. Raises
    ModelError."""
    text = nested(raw, "text_config") or raw
    tied = bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    require(bool(text.get("attn_output_gate", True)), "attn_output_gate is false: not supported")
    config = _stack(dict(text) | {"tie_word_embeddings": tied}, "by part")
    return replace(
        config,
        layers=tuple(replace(layer, mlp=_stacked(layer.mlp)) for layer in config.layers),
        prefix="model." if text is raw else "model.language_model.",
    )


def _stacked(mlp: MlpConfig) -> MlpConfig:
    if not isinstance(mlp, MoeConfig):
        return mlp
    return replace(mlp, stored="stacked", into="mlp.experts.gate_up_proj", back="mlp.experts.down_proj")


def _stack(raw: Raw, stored: Literal["by head", "by part"]) -> ArchitectureConfig:
    require_silu(raw)
    num_layers = size(raw, "num_hidden_layers")
    every = count(raw, "full_attention_interval") or ATTENTION_EVERY
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    kinds: dict[str, AttentionConfig | DeltaConfig] = {
        "full_attention": gated_attention_of(raw),
        "linear_attention": DeltaConfig(spec=linear_of(raw), stored=stored),
    }
    mixers = [kinds[name] for name in layer_kinds(raw, default, set(kinds))]
    return replace(config_of(raw, stacked(mixers, _mlps_of(raw))), norm_offset=NORM_OFFSET)


def draft_of(raw: Raw) -> LayerConfig:
    """Return the layer of the prediction head (MTP): attention, and an MLP like that of the first layer."""
    return LayerConfig(mixer=gated_attention_of(raw), mlp=_mlps_of(raw)[0])


def draft_of_qwen3_5(raw: Raw) -> LayerConfig:
    layer = draft_of(nested(raw, "text_config") or raw)
    return replace(layer, mlp=_stacked(layer.mlp))


def _mlps_of(raw: Raw) -> list[MlpConfig]:
    """Return the MLPs. A token's weights sum to 1 unless config.json has norm_topk_prob false."""
    return mlps_of({"norm_topk_prob": True} | dict(raw))


def gated_attention_of(raw: Raw) -> AttentionConfig:
    attention = attention_of(raw, normed=True)
    rope = rope_of(raw, attention.spec.head_dim, ROTARY_SHARE)
    return replace(attention, rope=rope, gated=True, norm_offset=NORM_OFFSET)


def linear_of(raw: Raw) -> Linear:
    """Return the layers with a state."""
    linear = Linear(
        key_heads=size(raw, "linear_num_key_heads"),
        value_heads=size(raw, "linear_num_value_heads"),
        key_dim=size(raw, "linear_key_head_dim"),
        value_dim=size(raw, "linear_value_head_dim"),
        conv_width=size(raw, "linear_conv_kernel_dim"),
    )
    require(
        linear.value_heads % linear.key_heads == 0, "linear_num_value_heads is no multiple of the key heads"
    )
    return linear
