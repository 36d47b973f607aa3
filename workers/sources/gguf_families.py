"""The architectures of GGUF files that are served, as data: their config.json and the names of tensors."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from tidemill.workers.sources.gguf_header import GgufFile
from tidemill.workers.sources.names import SourceError

COMMON = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
"""The keys of config.json, and those of the metadata behind the name of the architecture."""

EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
"""Tensors outside of layers: our names, and those in files."""

ATTENTION = {
    f"self_attn.{ours}_proj.{part}": f"attn_{theirs}.{part}"
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
    for part in ("weight", "bias")
} | {f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in "qk"}

DENSE = {f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")}

LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **ATTENTION,
    **DENSE,
}

SEPARATE = {"mlp.gate.weight": "ffn_gate_inp.weight"} | {
    f"mlp.experts.*.{name}_proj.weight": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")
}
"""Experts that each have tensors of their own: `*` is a row of the file's tensor."""

SHARED = {"mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight"} | {
    f"mlp.shared_expert.{name}_proj.weight": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")
}
STACKED = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_exps.weight + ffn_up_exps.weight | ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
WOVEN = {
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.gate_up_proj": "ffn_gate_exps.weight + ffn_up_exps.weight",
    "mlp.experts.gate_up_proj_bias": "ffn_gate_exps.bias + ffn_up_exps.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
DELTA = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
BY_HEAD = {
    "linear_attn.in_proj_qkvz.weight": "attn_qkv.weight + attn_gate.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
}
BY_PART = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
}
MAMBA = {
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.input_linear.weight": "ffn_gate_exps.weight + ffn_up_exps.weight",
    "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
    "shared_mlp.input_linear.weight": (
        "ffn_gate_shexp.weight + ffn_up_shexp.weight | ffn_gate.weight + ffn_up.weight"
    ),
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight | ffn_down.weight",
}

STATES = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
}
GRANITE = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}

ROTARY = {f"self_attn.{name}_proj.{part}": "rotary" for name in "qk" for part in ("weight", "bias")}
OFFSET = dict.fromkeys(
    (
        "model.norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ),
    "plus 1",
)
LOG = {"linear_attn.A_log": "minus exp", "mamba.A_log": "minus exp"}
TILED = {
    "linear_attn.in_proj_qkv.weight": "tiled behind keys",
    "linear_attn.conv1d.weight": "tiled behind keys",
    "linear_attn.out_proj.weight": "tiled columns",
    "linear_attn.A_log": "tiled minus exp",
    **dict.fromkeys(
        (
            f"linear_attn.{name}"
            for name in ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "dt_bias")
        ),
        "tiled",
    ),
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of GGUF files.

    architecture, model_type    of config.json
    keys                        of config.json, as in COMMON
    fixed                       the content of config.json that no metadata has
    tensors                     our names in a layer, and those in files; several are joined by rows
    changes                     how the converter to GGUF has changed a tensor, by our name
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: COMMON)
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: Mapping[str, str] = field(default_factory=lambda: LAYER)
    changes: Mapping[str, str] = field(default_factory=dict[str, str])


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", changes=ROTARY),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        keys=COMMON | EXPERTS,
        fixed={"norm_topk_prob": True},
        tensors=LAYER | SEPARATE,
    ),
    "qwen3next": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        keys=COMMON | EXPERTS | STATES,
        tensors=LAYER | SEPARATE | SHARED | DELTA | BY_HEAD,
        changes=OFFSET | LOG | {"linear_attn.in_proj_qkvz.weight": "by part"},
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        keys=COMMON | STATES,
        tensors=LAYER | DELTA | BY_PART,
        changes=OFFSET | TILED,
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        keys=COMMON | EXPERTS | STATES,
        tensors=LAYER | STACKED | SHARED | DELTA | BY_PART,
        changes=OFFSET | TILED,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        keys=COMMON | EXPERTS | {"sliding_window": "attention.sliding_window"},
        fixed={"rope_scaling": {"truncate": False}},
        tensors=LAYER | WOVEN,
        changes=dict.fromkeys(("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"), "apart"),
    ),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        keys=COMMON | GRANITE,
        fixed={"position_embedding_type": "nope"},
        tensors=LAYER | MAMBA,
        changes=ROTARY | LOG,
    ),
}
"""The families by `general.architecture`."""

LLAMA3_LENGTH, LLAMA3_FAST = 8192, 4.0
"""The numbers of Llama 3's rotary embedding that files do not name: they hold its factors."""


def family_of(file: GgufFile) -> Family:
    """Return the family of a file. Raises SourceError."""
    name = file.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise SourceError(f"{file.path} is a {name}: GGUF files are served of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def config_of(file: GgufFile, names: frozenset[str]) -> dict[str, Any]:
    """Return the content of config.json. `names` are the tensors of all shards. Raises SourceError."""
    family, name = family_of(file), file.metadata["general.architecture"]
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    raw = {key: _even(own[theirs]) for key, theirs in family.keys.items() if theirs in own}
    if "token_embd.weight" not in file.tensors:
        raise SourceError(f"{file.path} has no tensor token_embd.weight: give the first file of a model")
    raw |= {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        **family.fixed,
    }
    if "ssm.inner_size" in own:  # of value heads, and of Mamba heads
        raw["linear_value_head_dim"] = own["ssm.inner_size"] // own["ssm.time_step_rank"]
        raw["mamba_expand"] = own["ssm.inner_size"] / raw["hidden_size"]
    if isinstance(raw.get("num_key_value_heads"), list):  # 0 for layers with a state
        kv_heads = cast("list[int]", raw["num_key_value_heads"])
        raw["layer_types"] = ["attention" if heads else "mamba" for heads in kv_heads]
        raw["num_key_value_heads"] = max(kv_heads)
    if "shared_intermediate_size" not in raw:
        raw["shared_intermediate_size"] = raw.get("intermediate_size")
    rotary = own.get("rope.dimension_count")
    if rotary is not None and raw.get("head_dim") not in {None, rotary}:
        raw["partial_rotary_factor"] = rotary / raw["head_dim"]
    scaling = _llama3(file) if "rope_freqs.weight" in file.tensors else _scaling(own)
    return raw | ({"rope_scaling": raw.get("rope_scaling", {}) | scaling} if scaling else {})


def _even(value: Any) -> Any:  # noqa: ANN401 - metadata
    """Return the number that all layers have, if they have one each."""
    values = cast("list[Any]", value if isinstance(value, list) else [value])
    return values[0] if values and values.count(values[0]) == len(values) else values


def _scaling(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the rotary embedding is stretched, as config.json has it."""
    keys = {
        "rope_type": "type",
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {
        key: own[f"rope.scaling.{theirs}"] for key, theirs in keys.items() if f"rope.scaling.{theirs}" in own
    }
    return {} if found.get("rope_type", "none") == "none" else found


def _llama3(file: GgufFile) -> dict[str, Any]:
    """Return the scaling of Llama 3, whose factors of frequencies a file holds. Raises SourceError."""
    tensor = file.tensors["rope_freqs.weight"]
    data = file.mapped[tensor.start_byte : tensor.start_byte + tensor.num_bytes]
    factors = struct.unpack(f"<{len(data) // 4}f", data)
    theta, largest = file.metadata.get("llama.rope.freq_base", 0.0), max(factors)
    for index, factor in enumerate(factors):
        rotations = LLAMA3_LENGTH * theta ** (-index / len(factors)) / (2 * math.pi)
        kept = min(max((rotations - 1) / (LLAMA3_FAST - 1), 0.0), 1.0)
        if not math.isclose(1 / factor, (1 - kept) / largest + kept, rel_tol=1e-4):
            raise SourceError(
                f"{file.path} stretches frequencies in a way that is not Llama 3's (rope_freqs.weight): "
                "use the model's Hugging Face folder"
            )
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": 1.0,
        "high_freq_factor": LLAMA3_FAST,
        "original_max_position_embeddings": LLAMA3_LENGTH,
    }
