"""The layers of well-known models by their config.json, and their memory."""

from typing import Any

from tidemill.kernels.shared.quantization import Quantization
from tidemill.kvstore.layout import KvDtype, Layout, layout_of
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.registry import ARCHITECTURES
from tidemill.workers.models.loading.quantise import floats_bytes

PAGE_TOKENS = 64
CONTEXT_TOKENS = 32_768
WEIGHT_KINDS: tuple[Quantization | None, ...] = (None, "fp8", "int4")
YARN_ROPE: dict[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
QWEN3_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
QWEN3_NEXT_80B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262_144,
    "rope_theta": 1e7,
}
QWEN3_5_9B: dict[str, Any] = {
    name: value
    for name, value in QWEN3_NEXT_80B_A3B.items()
    if not name.startswith(("num_experts", "moe", "shared"))
} | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN3_5_35B_A3B: dict[str, Any] = QWEN3_NEXT_80B_A3B | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "vocab_size": 248_320,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
    "rope_scaling": YARN_ROPE | {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
}
GPT_OSS_120B: dict[str, Any] = GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_local_experts": 128,
}
GRANITE_4_H_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer in {5, 15, 25, 35} else "mamba" for layer in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131_072,
    "rope_theta": 10_000,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
RELEASED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA_3_1_8B,
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B_A3B,
    "Qwen3.5-9B": QWEN3_5_9B,
    "Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    "granite-4.0-h-small": GRANITE_4_H_SMALL,
    "DeepSeek-V3": DEEPSEEK_V3,
}


def released_layout(name: str, kv_dtype: KvDtype = "bfloat16") -> Layout:
    """Pages of this format, states of float32; the smallest extents."""
    raw = RELEASED[name]
    specs = ARCHITECTURES[raw["architectures"][0]].parse(raw).specs
    return layout_of(specs, PAGE_TOKENS, kv_dtype, extent_bytes_min=1, granule_bytes=1)


def weight_bytes_of(name: str, quantization: Quantization | None) -> int:
    """Return the bytes of all weights, in bfloat16 or quantised while they are read."""
    raw = RELEASED[name]
    weights = weights_of(ARCHITECTURES[raw["architectures"][0]].parse(raw)).values()
    return sum(floats_bytes(weight, quantization, 2) for weight in weights)


def bytes_by_architecture() -> list[dict[str, Any]]:
    """Return the bytes of a token in pages, of a sequence's window and state, and of a long sequence."""
    rows: list[dict[str, Any]] = []
    pages = -(-CONTEXT_TOKENS // PAGE_TOKENS)
    for name in RELEASED:
        layout = released_layout(name)
        window_bytes = len(layout.last_window(pages)) * layout.window_bytes
        kinds = {
            "attention": layout.attention,
            "window": layout.windows,
            "latent": layout.latents,
            "linear": layout.linear,
        }
        rows.append(
            {
                "model": name,
                "layers": ", ".join(f"{len(specs)} {kind}" for kind, specs in kinds.items() if specs),
                "bytes_per_token": layout.page_bytes // PAGE_TOKENS,
                "bytes_per_token_fp8": released_layout(name, "fp8_per_token_head").page_bytes // PAGE_TOKENS,
                "bytes_per_window": window_bytes,
                "bytes_per_state": layout.state_bytes,
                "bytes_of_a_sequence": pages * layout.page_bytes + layout.state_bytes + window_bytes,
                "weight_bytes": {kind or "bfloat16": weight_bytes_of(name, kind) for kind in WEIGHT_KINDS},
            }
        )
    return rows
