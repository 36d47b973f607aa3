"""gpt-oss: layers alternate between full attention and a window, with sinks; each has a mixture of
experts."""

from dataclasses import replace

from tidemill.workers.models.architectures.config import ArchitectureConfig, LayerConfig, config_of
from tidemill.workers.models.architectures.qwen3 import attention_of
from tidemill.workers.models.layers.moe import MoeConfig, RouterConfig
from tidemill.workers.models.loading.config_json import Raw, layer_kinds, number, require_silu, size

THETA = 150_000.0


def parse(raw: Raw) -> ArchitectureConfig:
    """Return the architecture. Raises ModelError for what is missing or not supported."""
    require_silu(raw)
    raw = {"rope_theta": THETA, "attention_bias": True} | dict(raw)
    kinds = {
        "full_attention": replace(attention_of(raw), sinks=True),
        "sliding_attention": replace(attention_of(raw, window=size(raw, "sliding_window")), sinks=True),
    }
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
    layers = (LayerConfig(mixer=kinds[name], mlp=experts) for name in layer_kinds(raw, default, set(kinds)))
    return config_of(raw, layers, epsilon=1e-5)
