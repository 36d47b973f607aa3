"""Full attention: Llama, Qwen2, Qwen3 and Qwen3-MoE (and models with their config.json)."""

from dataclasses import replace

from tidemill.kvstore.layout import Attention, Window
from tidemill.workers.models.architectures.config import ArchitectureConfig, config_of, stacked
from tidemill.workers.models.layers.attention import AttentionConfig
from tidemill.workers.models.layers.mlp import DenseConfig
from tidemill.workers.models.layers.moe import MoeConfig, RouterConfig
from tidemill.workers.models.layers.rope import rope_of
from tidemill.workers.models.layers.work import MlpConfig
from tidemill.workers.models.loading.config_json import Raw, count, layer_kinds, require, require_silu, size


def parse_llama(raw: Raw) -> ArchitectureConfig:
    """Return the architecture. Raises ModelError for what is missing or not supported."""
    return stack(raw, [attention_of(raw)] * size(raw, "num_hidden_layers"))


def parse_qwen2(raw: Raw) -> ArchitectureConfig:
    """Return the architecture. Raises ModelError for what is missing or not supported."""
    require(not raw.get("use_sliding_window"), "use_sliding_window is true: not supported")
    attention = replace(attention_of(raw), bias=True, out_bias=False)
    return stack(raw, [attention] * size(raw, "num_hidden_layers"))


def parse_qwen3(raw: Raw) -> ArchitectureConfig:
    """Return the architecture: dense or, where there are experts, a mixture. Raises ModelError."""
    attention = attention_of(raw, normed=True)
    num_layers = size(raw, "num_hidden_layers")
    if not raw.get("use_sliding_window"):
        return stack(raw, [attention] * num_layers)
    # As in Qwen2: the first layers have full attention, the others a window.
    first = size(raw, "max_window_layers")
    default = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    window = attention_of(raw, normed=True, window=size(raw, "sliding_window"))
    kinds = {"full_attention": attention, "sliding_attention": window}
    return stack(raw, [kinds[name] for name in layer_kinds(raw, default, set(kinds))])


def attention_of(raw: Raw, *, normed: bool = False, window: int | None = None) -> AttentionConfig:
    """Return the attention of all layers with full attention, or with a `window` of tokens."""
    query_heads = size(raw, "num_attention_heads")
    kv_heads = size(raw, "num_key_value_heads", "num_attention_heads")
    require(query_heads % kv_heads == 0, "num_attention_heads is no multiple of num_key_value_heads")
    head_dim = count(raw, "head_dim") or size(raw, "hidden_size") // query_heads
    bias = bool(raw.get("attention_bias", False))
    return AttentionConfig(
        spec=Attention(kv_heads=kv_heads, head_dim=head_dim)
        if window is None
        else Window(kv_heads=kv_heads, head_dim=head_dim, tokens=window),
        query_heads=query_heads,
        rope=rope_of(raw, head_dim),
        normed=normed,
        bias=bias,
        out_bias=bias,
    )


def stack(raw: Raw, mixers: list[AttentionConfig]) -> ArchitectureConfig:
    require_silu(raw)
    return config_of(raw, stacked(mixers, mlps_of(raw)))


def mlps_of(raw: Raw) -> list[MlpConfig]:
    """Return the MLP of each layer: dense, or experts where config.json has them."""
    num_layers = size(raw, "num_hidden_layers")
    num_experts = count(raw, "num_experts") or count(raw, "num_local_experts")
    every = count(raw, "decoder_sparse_step") or 1
    only: set[int] = set(raw.get("mlp_only_layers") or ())

    def is_sparse(index: int) -> bool:
        return num_experts > 0 and index not in only and (index + 1) % every == 0

    return [
        experts_of(raw, num_experts)
        if is_sparse(index)
        else DenseConfig(inner=size(raw, "intermediate_size"), bias=bool(raw.get("mlp_bias", False)))
        for index in range(num_layers)
    ]


def experts_of(raw: Raw, num_experts: int) -> MoeConfig:
    """Return the experts, with one that all tokens share where config.json has a size for it."""
    shared = count(raw, "shared_expert_intermediate_size")
    return MoeConfig(
        router=RouterConfig(
            weight="mlp.gate.weight",
            top_k=size(raw, "num_experts_per_tok"),
            renormalise=bool(raw.get("norm_topk_prob", False)),
        ),
        count=num_experts,
        inner=size(raw, "moe_intermediate_size"),
        shared=DenseConfig(inner=shared, prefix="mlp.shared_expert.") if shared else None,
        shared_gate="mlp.shared_expert_gate.weight" if shared else None,
    )
