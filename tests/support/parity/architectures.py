"""Random models of every architecture, as Hugging Face folders, with weights that all shape the logits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
UNEVEN = {"hidden_size": 50, "intermediate_size": 67}
"""The sizes that ranks cannot divide."""
DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL_ROPE = DEFAULT_ROPE | {"partial_rotary_factor": 0.25}
TEXT_ROPE = PARTIAL_ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
YARN: dict[str, Any] = {  # to 512 tokens
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 39}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 23}
DELTA: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": PARTIAL_ROPE,
}
WIDER = {"linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 40}
TEXT = DELTA | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention"] * 2}
TEXT |= {"layer_types": TEXT["layer_types"][:3], "rope_parameters": TEXT_ROPE}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
MAMBA = {name: value for name, value in SIZES.items() if name != "intermediate_size"} | {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "intermediate_size": 27,
    "shared_intermediate_size": 35,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
MLA: dict[str, Any] = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "rope_parameters": DEFAULT_ROPE,
}


class Shape(NamedTuple):
    """One configuration of an architecture, by the names of transformers' classes."""

    config: str
    model: str
    settings: dict[str, Any]


def _shapes(config: str, model: str, base: dict[str, Any], **shapes: dict[str, Any]) -> dict[str, Shape]:
    return {name.replace("_", "-"): Shape(config, model, base | changes) for name, changes in shapes.items()}


MODELS: dict[str, dict[str, Shape]] = {
    "llama": _shapes(
        "LlamaConfig",
        "LlamaForCausalLM",
        SIZES | {"rope_parameters": DEFAULT_ROPE},
        tied=UNEVEN
        | {"hidden_size": 54, "num_attention_heads": 6, "head_dim": 8, "tie_word_embeddings": True},
        stretched={
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
        odd={"num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-5},
    ),
    "qwen2": _shapes("Qwen2Config", "Qwen2ForCausalLM", SIZES | {"rope_parameters": DEFAULT_ROPE}, tied={}),
    "qwen3": _shapes(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        SIZES | {"head_dim": 16, "rope_parameters": DEFAULT_ROPE},
        tied={"tie_word_embeddings": True},
        stretched={
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": YARN,
            "max_position_embeddings": 512,
        },
    ),
    "qwen3_moe": _shapes(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        SIZES | EXPERTS | {"head_dim": 16, "rope_parameters": DEFAULT_ROPE},
        all={"norm_topk_prob": True},
        some={"num_hidden_layers": 3, "mlp_only_layers": [1], "num_attention_heads": 6},
    ),
    "qwen3_next": _shapes(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        DELTA,
        dense_tied=UNEVEN | {"num_experts": 0, "tie_word_embeddings": True},
        moe_two_values=SHARED
        | WIDER
        | {"linear_conv_kernel_dim": 3, "decoder_sparse_step": 2, "attention_bias": True},
        moe_four_values=SHARED
        | {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "rope_parameters": DEFAULT_ROPE | {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5": _shapes("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", TEXT, text={"tie_word_embeddings": True})
    | _shapes("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", TEXT, with_images=WIDER),
    "qwen3_5_moe": _shapes("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", TEXT | SHARED, text={})
    | _shapes("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", TEXT | SHARED, with_images=WIDER),
    "gpt_oss": _shapes(
        "GptOssConfig",
        "GptOssForCausalLM",
        SIZES
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rope_parameters": YARN,
            "max_position_embeddings": 512,
        },
        alternating=UNEVEN | {"sliding_window": 24, "swiglu_limit": 1.5},
        page_wide={
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        narrow={"sliding_window": 3, "rope_parameters": YARN | {"truncate": False}},
    ),
    "granitemoehybrid": _shapes(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        MAMBA,
        moe={},
        dense={
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "position_embedding_type": "rope",
            "rope_parameters": DEFAULT_ROPE,
            "tie_word_embeddings": True,
            "time_step_limit": (0.05, 0.6),
            "embedding_multiplier": 0.7,
            "residual_multiplier": 1.2,
        },
    ),
    "deepseek_v3": _shapes(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        MLA,
        groups=UNEVEN
        | {
            "moe_intermediate_size": 23,
            "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2},
            "max_position_embeddings": 512,
        },
        plain_query={
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        },
    ),
}


def names() -> Iterator[str]:
    """`architecture/shape`, of all."""
    for architecture, shapes in MODELS.items():
        for shape in shapes:
            yield f"{architecture}/{shape}"


def random_model(name: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """transformers' model of that name, or of an architecture's first shape, with `changes` in its config;
    every weight is drawn so that each part shapes the logits."""
    architecture, _, shape = name.partition("/")
    found = MODELS[architecture][shape or next(iter(MODELS[architecture]))]
    settings = found.settings | changes
    if found.model.endswith("ForConditionalGeneration"):
        text = getattr(transformers, found.config.replace("Config", "TextConfig"))(**settings)
        settings = {"text_config": text.to_dict(), "vision_config": VISION}
    config = getattr(transformers, found.config)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, found.model)(config).eval()
    draw = torch.Generator().manual_seed(seed)
    tied = config.get_text_config().tie_word_embeddings
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if key == "lm_head.weight" and tied:
                continue
            noise = torch.randn(weight.shape, generator=draw)
            if "sinks" in key:
                weight.copy_(2 + noise)
            elif weight.dim() == 1:
                weight.add_(0.3 * noise)
            elif "embed_tokens" in key:
                weight.copy_(noise * (0.3 if tied else 1))
            else:
                weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
    return model


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Save a model as the hub has it. transformers separates the experts of Qwen3.5 when it saves them: a
    folder of a model for images has them together, one for texts separate, and both are tested."""
    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_5_moe":
        path = folder / "model.safetensors"
        save_file(_experts_together(load_file(path)), path, metadata={"format": "pt"})
    return folder


def _experts_together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    if any(name.endswith(".experts.gate_up_proj") for name in tensors):
        return tensors
    for layer in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        count = len({name for name in tensors if name.startswith(f"{layer}.experts.") and "down" in name})
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{i}.{part}_proj.weight"] for i in range(count)])
            for part in ("gate", "up", "down")
        )
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{layer}.experts.down_proj"] = down
    return found
