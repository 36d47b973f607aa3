"""Granite 4 (granitemoehybrid): Mamba-2 and attention layers, with experts, a shared MLP, or both."""

from dataclasses import replace
from math import gcd
from typing import Any, cast

from tidemill.kvstore.layout import Attention, Linear
from tidemill.workers.models.architectures.config import ArchitectureConfig, LayerConfig, config_of
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.layers.attention import AttentionConfig
from tidemill.workers.models.layers.mamba2 import Mamba2Config
from tidemill.workers.models.layers.mlp import DenseConfig
from tidemill.workers.models.layers.moe import MoeConfig, RouterConfig
from tidemill.workers.models.layers.rope import rope_of
from tidemill.workers.models.layers.work import MixerConfig, MlpConfig
from tidemill.workers.models.loading.config_json import (
    Raw,
    count,
    layer_kinds,
    number,
    require,
    require_silu,
    size,
)

ATTENTION, MAMBA = {"attention", "full_attention"}, {"mamba", "linear_attention"}
"""The kinds of layers by their names in its folders, and in later releases of transformers."""

HEAD_GROUPS_MAX = 8
"""The number of groups of Mamba heads, and so of the ranks that can share a model: each keeps a copy of B and
C."""


def parse(raw: Raw) -> ArchitectureConfig:
    """Return the architecture. Raises ModelError for what is missing or not supported."""
    require_silu(raw)
    named = {**raw, "layer_types": raw.get("layer_types") or raw.get("layers_block_type")}
    names = layer_kinds(named, ["mamba"] * size(raw, "num_hidden_layers"), ATTENTION | MAMBA)
    mixers: dict[str, MixerConfig] = dict.fromkeys(ATTENTION, _attention(raw))
    if MAMBA & set(names):  # models with only attention have meaningless sizes here
        mixers |= dict.fromkeys(MAMBA, _mamba(raw))
    mlp = _mlp(raw)
    return replace(
        config_of(raw, (LayerConfig(mixer=mixers[name], mlp=mlp) for name in names)),
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logits_scale=1 / number(raw, "logits_scaling", 1.0),
    )


def _attention(raw: Raw) -> AttentionConfig:
    query_heads = size(raw, "num_attention_heads")
    kv_heads = size(raw, "num_key_value_heads", "num_attention_heads")
    require(query_heads % kv_heads == 0, "num_attention_heads is no multiple of num_key_value_heads")
    head_dim = count(raw, "head_dim") or size(raw, "hidden_size") // query_heads
    positions, bias = raw.get("position_embedding_type") or "nope", bool(raw.get("attention_bias", False))
    require(positions in {"nope", "rope"}, f"position_embedding_type {positions!r}: not supported")
    return AttentionConfig(
        spec=Attention(kv_heads=kv_heads, head_dim=head_dim),
        query_heads=query_heads,
        rope=rope_of(raw, head_dim) if positions == "rope" else None,
        bias=bias,
        out_bias=bias,
        scale=number(raw, "attention_multiplier", 1.0),
    )


def _mamba(raw: Raw) -> Mamba2Config:
    heads, groups = size(raw, "mamba_n_heads"), size(raw, "mamba_n_groups")
    require(heads % groups == 0, "mamba_n_heads is no multiple of mamba_n_groups")
    inner = int(number(raw, "mamba_expand", 2) * size(raw, "hidden_size"))
    head_dim = inner // heads if raw.get("mamba_d_head") in {None, "auto"} else size(raw, "mamba_d_head")
    require(heads * head_dim == inner, "mamba_n_heads * mamba_d_head is not mamba_expand * hidden_size")
    head_groups = gcd(HEAD_GROUPS_MAX, heads)
    dt_min, dt_max = raw.get("time_step_limit") or (0.0, "inf")
    return Mamba2Config(
        spec=Linear(
            # Heads that share B and C stay together.
            key_heads=groups if head_groups % groups else head_groups,
            value_heads=heads,
            key_dim=size(raw, "mamba_d_state"),
            value_dim=head_dim,
            conv_width=size(raw, "mamba_d_conv"),
        ),
        bc_groups=groups,
        norm_groups=groups,
        dt_min=_bound(dt_min),
        dt_max=_bound(dt_max),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        bias=bool(raw.get("mamba_proj_bias", False)),
    )


def _bound(value: object) -> float:
    """Return a number. JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    found = cast("dict[str, Any]", value).get("__float__") if isinstance(value, dict) else value
    try:
        return float(cast("float", found))
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: time_step_limit has {value!r}: a number is needed") from error


def _mlp(raw: Raw) -> MlpConfig:
    shared = DenseConfig(
        inner=size(raw, "shared_intermediate_size"),
        prefix="shared_mlp.",
        gate_up="input_linear",
        down="output_linear",
    )
    if not count(raw, "num_local_experts"):
        return shared
    return MoeConfig(
        router=RouterConfig(
            weight="block_sparse_moe.router.layer.weight", top_k=size(raw, "num_experts_per_tok")
        ),
        count=size(raw, "num_local_experts"),
        inner=size(raw, "intermediate_size"),
        stored="stacked",
        into="block_sparse_moe.input_linear.weight",
        back="block_sparse_moe.output_linear.weight",
        shared=shared,
    )
