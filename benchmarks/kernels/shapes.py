"""The models that are measured, and the rows of a step."""

from typing import Any

import torch

from tidemill.workers.models.inputs import Inputs

PAGE_TOKENS = 64
HYBRID_77M: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "tie_word_embeddings": False,
}
"""A small Qwen3-Next with the heads and experts of a large one."""


def step_inputs(new: list[int], before: list[int], page_tokens: int = PAGE_TOKENS) -> Inputs:
    """Rows of `new` tokens after `before`, with pages and states of their own."""
    lens = [n + old for n, old in zip(new, before, strict=True)]
    width = -(-max(lens) // page_tokens)
    cu = torch.tensor([0, *new]).cumsum(0)
    return Inputs(
        tokens_T=torch.arange(int(cu[-1])) % 800,
        positions_T=torch.cat([torch.arange(old, old + n) for n, old in zip(new, before, strict=True)]),
        cu_B1=cu.to(torch.int32),
        pages_BN=torch.randperm(len(new) * width).view(len(new), width).to(torch.int32),
        windows_BN=torch.zeros(len(new), 0, dtype=torch.int32),
        lens_B=torch.tensor(lens, dtype=torch.int32),
        read_B=torch.arange(len(new), dtype=torch.int32),
        writes_BK=torch.arange(len(new), dtype=torch.int32)[:, None],
    )
