# pyright: basic
# transformers' classes have no usable types.
"""Random Qwen3-Next folders with weights that matter, and a small engine that runs any schedule of steps."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tidemill.kvstore.layout import KvDtype, Layout, layout_of
from tidemill.workers.inputs import Inputs, caches_of
from tidemill.workers.models.registry import LoadedModel

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 0,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense-tied": {"tie_word_embeddings": True},
    "moe-two-values": MOE
    | {
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 40,
        "linear_conv_kernel_dim": 3,
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "moe-four-values": MOE
    | {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    },
}


def random_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """transformers' model of `CONFIGS[name]`, every weight drawn so that each part shapes the logits."""
    config = transformers.Qwen3NextConfig(**(BASE | CONFIGS[name]))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.Qwen3NextForCausalLM(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if weight.dim() == 1:
                weight.add_(0.3 * noise)
            elif "embed_tokens" in key:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
    return model


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@dataclass
class Sequence:
    """A sequence being fed: its tokens, how many are computed, and the memory it owns."""

    tokens: list[int]
    pages: list[int]
    state: int
    computed: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)


class Runner:
    """Runs steps of a loaded model over a NaN-poisoned arena with shuffled pages."""

    def __init__(self, loaded: LoadedModel, page_tokens: int, kv_dtype: KvDtype = "float32") -> None:
        self.loaded = loaded
        self.layout: Layout = layout_of(loaded.layers, page_tokens, kv_dtype)
        extents = 8
        arena = torch.full((extents * self.layout.extent_bytes,), 0xFF, dtype=torch.uint8)
        self.caches = caches_of(self.layout, arena)
        half = extents // 2
        draw = torch.Generator().manual_seed(0)
        self.free_pages = torch.randperm(half * self.layout.pages_per_extent, generator=draw).tolist()
        first, end = half * self.layout.states_per_extent, extents * self.layout.states_per_extent
        self.free_states = [first + int(i) for i in torch.randperm(end - first, generator=draw)]

    def add(self, tokens: list[int], length: int | None = None) -> Sequence:
        """A sequence with memory for `length` tokens."""
        count = -(-(length or len(tokens)) // self.layout.page_tokens)
        pages = [self.free_pages.pop() for _ in range(count)]
        return Sequence(tokens, pages, self.free_states.pop())

    def step(self, batch: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Runs the next `n` tokens of each sequence. Returns the hidden states of the step."""
        ends = [sequence.computed + n for sequence, n in batch]
        width = max(len(sequence.pages) for sequence, _ in batch)
        inputs = Inputs(
            tokens_T=torch.tensor([t for (s, n) in batch for t in s.tokens[s.computed : s.computed + n]]),
            positions_T=torch.tensor([i for (s, n) in batch for i in range(s.computed, s.computed + n)]),
            cu_B1=torch.tensor([0, *(n for _, n in batch)]).cumsum(0).to(torch.int32),
            pages_BN=torch.tensor(
                [s.pages + [0] * (width - len(s.pages)) for s, _ in batch], dtype=torch.int32
            ),
            lens_B=torch.tensor(ends, dtype=torch.int32),
            read_B=torch.tensor([s.state if s.computed else -1 for s, _ in batch], dtype=torch.int32),
            writes_BK=torch.tensor([[s.state] for s, _ in batch], dtype=torch.int32),
        )
        hidden = self.loaded.model.forward(inputs, self.caches)
        start = 0
        for sequence, n in batch:
            sequence.hidden.append(hidden[start : start + n])
            sequence.computed += n
            start += n
        return hidden

    def run(self, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits of every token of one sequence fed in `chunks`."""
        sequence = self.add(tokens)
        for n in chunks:
            self.step([(sequence, n)])
        return self.loaded.model.logits(torch.cat(sequence.hidden))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens, the likeliest each time; the last prompt token is a step of its own."""
        sequence = self.add(list(prompt), len(prompt) + count)
        self.step([(sequence, len(prompt) - 1)])
        for _ in range(count):
            hidden = self.step([(sequence, 1)])
            sequence.tokens.append(int(self.loaded.model.logits(hidden).argmax()))
        return sequence.tokens[len(prompt) :]
