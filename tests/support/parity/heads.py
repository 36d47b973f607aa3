"""Random Qwen3-Next folders with a prediction head: one that is often right, or one of noise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tidemill.workers.models.architectures.config import DRAFT, weights_of
from tidemill.workers.models.architectures.qwen3_next import draft_of, parse

BACK = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
QUIET = 0.08
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 50,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 67,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 23,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}


def folder_with_head(folder: Path, *, agrees: bool, **changes: object) -> Path:
    """Return a folder with a prediction head. If the head `agrees`, the layers of both add little to the
    embedding of a token. Then the next token is nearly a function of it, and nearly the same one for model
    and head."""
    raw = SHAPE | changes
    config = replace(parse(raw), draft=draft_of(raw))
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights_of(config).items():
        scale = 0.3 if len(weight.shape) == 1 else 1.0 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5
        tensors[name] = scale * torch.randn(weight.shape, generator=draw)
        if agrees and name.endswith(BACK):
            tensors[name] *= QUIET
    if agrees:
        tensors[f"{DRAFT}pre_fc_norm_embedding.weight"].zero_()
        tensors[f"{DRAFT}fc.weight"] = torch.eye(config.hidden, 2 * config.hidden)
        tensors[f"{DRAFT}norm.weight"] = tensors["model.norm.weight"].clone()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
