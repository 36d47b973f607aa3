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

ROTARY = dict.fromkeys(
    (f"self_attn.{name}_proj.{part}" for name in "qk" for part in ("weight", "bias")), "rotary"
)


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
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        keys=COMMON | EXPERTS,
        fixed={"norm_topk_prob": True},
        tensors=LAYER | SEPARATE,
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


def head_dim_of(file: GgufFile) -> int:
    """Return the width of a head of attention. Raises SourceError."""
    config = config_of(file, frozenset())
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


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
    rotary = own.get("rope.dimension_count")
    if rotary is not None and raw.get("head_dim") not in {None, rotary}:
        raw["partial_rotary_factor"] = rotary / raw["head_dim"]
    scaling = _llama3(file) if "rope_freqs.weight" in file.tensors else _scaling(own)
    return raw | ({"rope_scaling": scaling} if scaling else {})


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
