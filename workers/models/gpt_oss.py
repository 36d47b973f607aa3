"""gpt-oss: attention to all tokens and to a window by turns, with sinks; each layer a mixture of experts."""

from dataclasses import replace

from tidemill.workers.models.config import Config, LayerConfig
from tidemill.workers.models.moe import MoeConfig, RouterConfig
from tidemill.workers.models.qwen3 import attention_of
from tidemill.workers.models.raw import Raw, layer_kinds, number, require_silu, size

THETA = 150_000.0


def parse(raw: Raw) -> Config:
    """Raises ModelError for what is missing or not supported."""
    require_silu(raw)
    raw = {"rope_theta": THETA, "attention_bias": True} | dict(raw)
    everything = replace(attention_of(raw, out_bias=bool(raw["attention_bias"])), sinks=True)
    window = attention_of(raw, out_bias=everything.out_bias, window=size(raw, "sliding_window"))
    kinds = {"full_attention": everything, "sliding_attention": replace(window, sinks=True)}
    default = [
        "full_attention" if index % 2 else "sliding_attention"
        for index in range(size(raw, "num_hidden_layers"))
    ]
    experts = MoeConfig(
        router=RouterConfig(
            weight="mlp.router.weight",
            bias="mlp.router.bias",
            top_k=size(raw, "num_experts_per_tok", "experts_per_token"),
        ),
        count=size(raw, "num_local_experts", "num_experts"),
        inner=size(raw, "intermediate_size"),
        stored="woven",
        into="mlp.experts.gate_up_proj",
        back="mlp.experts.down_proj",
        activation="clamped",
        alpha=number(raw, "swiglu_alpha", 1.702),
        limit=number(raw, "swiglu_limit", 7.0),
    )
    return Config(
        layers=tuple(
            LayerConfig(mixer=kinds[name], mlp=experts) for name in layer_kinds(raw, default, set(kinds))
        ),
        vocab_size=size(raw, "vocab_size"),
        hidden=size(raw, "hidden_size"),
        epsilon=number(raw, "rms_norm_eps", 1e-5),
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_length=size(raw, "max_position_embeddings"),
    )
