# pyright: reportUnknownVariableType=false
# safetensors leaves a type parameter of its paths open.
"""Random hybrids without transformers, and one schedule of steps over them; as a program, one rank of it."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tidemill.kernels.dispatch import Operators, operators
from tidemill.kvstore.layout import layout_of
from tidemill.workers.inputs import Inputs, caches_of
from tidemill.workers.models.qwen3_next_config import parse, tensor_shapes
from tidemill.workers.models.registry import load
from tidemill.workers.tp.collectives import ALONE, Ranks
from tidemill.workers.tp.distributed import Distributed
from tidemill.workers.tp.shared_memory import SharedMemory

WAIT_S_MAX = 60.0
PAGE_TOKENS = 8
LENGTHS = (37, 22)
STEPS: tuple[tuple[int, int], ...] = ((11, 0), (17, 9), (1, 5), (1, 1), (4, 1), (1, 3), (1, 1), (1, 2))
"""Tokens of each sequence in each step: prefill, chunks beside decode, decode."""

BASE: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 50,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 67,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense, tied, odd vocabulary": {"tie_word_embeddings": True},
    "experts, one KV head": {
        "num_key_value_heads": 1,
        "linear_num_value_heads": 8,
        "attention_bias": True,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 19,
        "shared_expert_intermediate_size": 23,
        "decoder_sparse_step": 2,
        "vocab_size": 9,
    },
    "attention only": {"layer_types": ["full_attention"] * 3, "num_attention_heads": 12},
}


def random_folder(folder: Path, **changes: object) -> Path:
    """A model folder whose weights all shape the logits."""
    config = BASE | changes
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(parse(config)).items():
        scale = 0.3 if len(shape) == 1 else 1.0 if "embed" in name else 1.5 / shape[-1] ** 0.5
        tensors[name] = scale * torch.randn(shape, generator=draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def hidden_and_logits(
    folder: Path, ops: Operators, ranks: Ranks = ALONE
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Fingerprint, hidden states and logits of every token of `STEPS`; logits are the leader's."""
    loaded = load(folder, ops, lambda _done_bytes, _total_bytes: None, ranks)
    layout = layout_of(loaded.local_layers, PAGE_TOKENS)
    arena = torch.full((2 * layout.extent_bytes,), 0xFF, dtype=torch.uint8)
    caches = caches_of(layout, arena)
    states = layout.states_per_extent  # those of the second extent; pages are in the first
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, loaded.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=draw)
    pages = [[7, 1, 5, 3, 0], [2, 6, 4]]
    done = [0, 0]
    hidden: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for counts in STEPS:
        rows = [(i, done[i], done[i] + n) for i, n in enumerate(counts) if n]
        inputs = Inputs(
            tokens_T=torch.cat([tokens[i, start:end] for i, start, end in rows]),
            positions_T=torch.cat([torch.arange(start, end) for _, start, end in rows]),
            cu_B1=_ints([0, *(end - start for _, start, end in rows)]).cumsum(0).int(),
            pages_BN=torch.stack([_ints((pages[i] + [0] * 5)[:5]) for i, _, _ in rows]),
            lens_B=_ints([end for _, _, end in rows]),
            read_B=_ints([states + i if start else -1 for i, start, _ in rows]),
            writes_BK=_ints([states + i if layout.hybrid else -1 for i, _, _ in rows])[:, None],
        )
        hidden.append(loaded.model.forward(inputs, caches))
        logits.append(loaded.model.logits(hidden[-1]))
        done = [before + n for before, n in zip(done, counts, strict=True)]
    assert tuple(done) == LENGTHS
    return loaded.fingerprint, torch.cat(hidden), torch.cat(logits)


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def main() -> None:
    """Writes what this rank found beside the model."""
    parser = ArgumentParser()
    parser.add_argument("collectives", choices=["gloo", "shared-memory"])
    parser.add_argument("index", type=int)
    parser.add_argument("size", type=int)
    for folder in ("model", "meeting", "kernels"):
        parser.add_argument(folder, type=Path)
    given = parser.parse_args(sys.argv[1:])
    torch.set_num_threads(1)
    if given.collectives == "gloo":
        ranks = Distributed(given.meeting, given.index, given.size, "gloo", WAIT_S_MAX)
    else:
        ranks = SharedMemory(given.meeting, given.index, given.size, WAIT_S_MAX)
    with closing(ranks):
        _, hidden, logits = hidden_and_logits(given.model, operators("cpu", given.kernels), ranks)
    save_file({"hidden": hidden, "logits": logits}, given.meeting / f"found-{given.index}.safetensors")


if __name__ == "__main__":
    main()
