"""DeepSeek-V3 and R1: multi-head latent attention; the first layers are dense, the others mixtures of
experts."""

from tidemill.kvstore.layout import Latent
from tidemill.workers.models.architectures.config import ArchitectureConfig, LayerConfig, config_of
from tidemill.workers.models.layers.latent import LatentConfig
from tidemill.workers.models.layers.mlp import DenseConfig
from tidemill.workers.models.layers.moe import MoeConfig, RouterConfig
from tidemill.workers.models.layers.rope import rope_of, yarn_mscale
from tidemill.workers.models.loading.config_json import (
    Raw,
    count,
    nested,
    number,
    require,
    require_silu,
    size,
)


def parse(raw: Raw) -> ArchitectureConfig:
    """Return the architecture. Raises ModelError for what is missing or not supported."""
    require_silu(raw)
    require(raw.get("moe_layer_freq", 1) == 1, "moe_layer_freq other than 1 is not supported")
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        require(raw.get(key, known) == known, f"{key} {raw.get(key)!r}: only {known} is supported")
    mixer, dense, experts = _attention(raw), DenseConfig(inner=size(raw, "intermediate_size")), _experts(raw)
    first = count(raw, "first_k_dense_replace")
    layers = (
        LayerConfig(mixer=mixer, mlp=dense if index < first else experts)
        for index in range(size(raw, "num_hidden_layers"))
    )
    return config_of(raw, layers)


def _attention(raw: Raw) -> LatentConfig:
    compressed, rotary = size(raw, "kv_lora_rank"), size(raw, "qk_rope_head_dim")
    plain = size(raw, "qk_nope_head_dim")
    return LatentConfig(
        spec=Latent(width=rotary + compressed),
        query_heads=size(raw, "num_attention_heads"),
        rope=rope_of(raw, rotary),
        compressed=compressed,
        plain=plain,
        value=size(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else size(raw, "q_lora_rank"),
        interleaved=bool(raw.get("rope_interleave", True)),
        bias=bool(raw.get("attention_bias", False)),
        scale=(plain + rotary) ** -0.5 * _focus(raw) ** 2,
    )


def _focus(raw: Raw) -> float:
    """Return the factor by which attention is more focused in a model that was extended to longer texts."""
    scaling = nested(raw, "rope_parameters", "rope_scaling")
    weight = number(scaling, "mscale_all_dim", 0.0)
    return yarn_mscale(number(scaling, "factor", 1.0), weight) if weight else 1.0


def _experts(raw: Raw) -> MoeConfig:
    inner, shared = size(raw, "moe_intermediate_size"), count(raw, "n_shared_experts")
    return MoeConfig(
        router=RouterConfig(
            weight="mlp.gate.weight",
            choice_bias="mlp.gate.e_score_correction_bias",
            top_k=size(raw, "num_experts_per_tok"),
            renormalise=bool(raw.get("norm_topk_prob", True)),
            score="sigmoid",
            groups=count(raw, "n_group") or 1,
            groups_kept=count(raw, "topk_group") or 1,
            scale=number(raw, "routed_scaling_factor", 1.0),
        ),
        count=size(raw, "n_routed_experts"),
        inner=inner,
        shared=DenseConfig(inner=inner * shared, prefix="mlp.shared_experts.") if shared else None,
    )
