"""What a Qwen3-Next config.json asks for: sizes, the kind of every layer, the tensors of the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tidemill.kvstore.layout import Attention, LayerSpec, Linear
from tidemill.kvstore.worth import Cost
from tidemill.workers.models.errors import ModelError

ROTARY_SHARE = 0.25
ATTENTION_EVERY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention: query heads, the rotary part of a head, and whether projections have a bias."""

    query_heads: int
    rotary_dim: int
    rope_theta: float
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Mixture of experts; `layers[i]` says whether layer i is one."""

    layers: tuple[bool, ...]
    experts: int
    top_k: int
    renormalise: bool
    inner: int
    shared_inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that decides the model's output besides its weights."""

    layers: tuple[LayerSpec, ...]
    heads: Heads
    routing: Routing
    vocab_size: int
    hidden: int
    inner: int
    epsilon: float
    tied: bool
    max_length: int


def parse(raw: Mapping[str, Any]) -> Config:
    """The config of `config.json`. Raises ModelError for what is missing or not supported."""
    _require(
        raw.get("hidden_act", "silu") == "silu",
        f"hidden_act {raw.get('hidden_act')!r}: only silu is supported",
    )
    num_layers = _size(raw, "num_hidden_layers")
    head_dim = _size(raw, "head_dim")
    attention = Attention(kv_heads=_size(raw, "num_key_value_heads"), head_dim=head_dim)
    linear = Linear(
        key_heads=_size(raw, "linear_num_key_heads"),
        value_heads=_size(raw, "linear_num_value_heads"),
        key_dim=_size(raw, "linear_key_head_dim"),
        value_dim=_size(raw, "linear_value_head_dim"),
        conv_width=_size(raw, "linear_conv_kernel_dim"),
    )
    kinds: dict[str, LayerSpec] = {"full_attention": attention, "linear_attention": linear}
    every = raw.get("full_attention_interval") or ATTENTION_EVERY
    names = raw.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    _require(len(names) == num_layers, f"layer_types has {len(names)} entries for {num_layers} layers")
    _require(
        set(names) <= kinds.keys(), f"layer_types has {sorted(set(names) - kinds.keys())}: not supported"
    )
    query_heads = _size(raw, "num_attention_heads")
    _require(
        query_heads % attention.kv_heads == 0, "num_attention_heads is no multiple of num_key_value_heads"
    )
    _require(
        linear.value_heads % linear.key_heads == 0, "linear_num_value_heads is no multiple of the key heads"
    )
    return Config(
        layers=tuple(kinds[name] for name in names),
        heads=_heads(raw, query_heads, head_dim),
        routing=_routing(raw, num_layers),
        vocab_size=_size(raw, "vocab_size"),
        hidden=_size(raw, "hidden_size"),
        inner=_size(raw, "intermediate_size"),
        epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_length=_size(raw, "max_position_embeddings"),
    )


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden)
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        match layer:
            case Attention():
                part = _attention_shapes(config, layer)
            case Linear():
                part = _linear_shapes(config, layer)
        part |= (
            _moe_shapes(config)
            if config.routing.layers[index]
            else _mlp_shapes("mlp", config.hidden, config.inner)
        )
        part |= {
            "input_layernorm.weight": (config.hidden,),
            "post_attention_layernorm.weight": (config.hidden,),
        }
        shapes |= {prefix + name: shape for name, shape in part.items()}
    return shapes


def cost(config: Config) -> Cost:
    """FLOPs of a forward pass: two per weight that a token meets, and attention to what is before it."""
    weights = 0.0
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and "embed_tokens" not in name:
            active = config.routing.top_k / config.routing.experts if ".experts." in name else 1.0
            weights += prod(shape) * active
    heads = config.heads.query_heads
    context = sum(4 * heads * layer.head_dim for layer in config.layers if isinstance(layer, Attention))
    return Cost(token_flops=2 * weights, context_flops=context)


def _attention_shapes(config: Config, layer: Attention) -> dict[str, tuple[int, ...]]:
    queries = config.heads.query_heads * layer.head_dim
    keys = layer.kv_heads * layer.head_dim
    outputs = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys}
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}.weight": (size, config.hidden) for name, size in outputs.items()
    }
    shapes["self_attn.o_proj.weight"] = (config.hidden, queries)
    if config.heads.bias:
        outputs["o_proj"] = config.hidden
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in outputs.items()}
    return shapes | {
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.k_norm.weight": (layer.head_dim,),
    }


def _linear_shapes(config: Config, layer: Linear) -> dict[str, tuple[int, ...]]:
    channels = layer.key_heads * layer.group_channels
    values = layer.value_heads * layer.value_dim
    return {
        "linear_attn.in_proj_qkvz.weight": (channels + values, config.hidden),
        "linear_attn.in_proj_ba.weight": (2 * layer.value_heads, config.hidden),
        "linear_attn.conv1d.weight": (channels, 1, layer.conv_width),
        "linear_attn.A_log": (layer.value_heads,),
        "linear_attn.dt_bias": (layer.value_heads,),
        "linear_attn.norm.weight": (layer.value_dim,),
        "linear_attn.out_proj.weight": (config.hidden, values),
    }


def _mlp_shapes(name: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def _moe_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    routing = config.routing
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (routing.experts, config.hidden),
        "mlp.shared_expert_gate.weight": (1, config.hidden),
    }
    shapes |= _mlp_shapes("mlp.shared_expert", config.hidden, routing.shared_inner)
    for expert in range(routing.experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", config.hidden, routing.inner)
    return shapes


def _heads(raw: Mapping[str, Any], query_heads: int, head_dim: int) -> Heads:
    # Newer folders nest what older ones keep at the top.
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(kind == "default", f"rope type {kind!r}: only default is supported")
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", ROTARY_SHARE))
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    _require(theta is not None, "no rope_theta")
    rotary_dim = int(head_dim * share)
    _require(rotary_dim % 2 == 0, f"{rotary_dim} rotary dimensions of a head: the number must be even")
    return Heads(
        query_heads=query_heads,
        rotary_dim=rotary_dim,
        rope_theta=float(theta or 0),
        bias=bool(raw.get("attention_bias", False)),
    )


def _routing(raw: Mapping[str, Any], num_layers: int) -> Routing:
    experts, every = int(raw.get("num_experts", 0)), int(raw.get("decoder_sparse_step", 1))
    dense: set[int] = set(raw.get("mlp_only_layers") or ())
    return Routing(
        layers=tuple(experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(num_layers)),
        experts=experts,
        top_k=_size(raw, "num_experts_per_tok") if experts else 0,
        renormalise=bool(raw.get("norm_topk_prob", True)),
        inner=_size(raw, "moe_intermediate_size") if experts else 0,
        shared_inner=_size(raw, "shared_expert_intermediate_size") if experts else 0,
    )


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    _require(isinstance(value, int) and value > 0, f"{key} is {value!r}: a positive number is needed")
    assert isinstance(value, int)
    return value


def _require(true: bool, problem: str) -> None:  # noqa: FBT001  the condition is the point
    if not true:
        raise ModelError(f"config.json: {problem}")
