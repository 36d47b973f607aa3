"""GGUF files of every family: transformers' logits, and the bits of one rank on several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.gguf_file import convert, round_weights
from tests.support.parity.proof import CHECKS, Subject, model_of
from tidemill.kernels.dispatch import Operators
from tidemill.workers.sources.gguf_families import FAMILIES
from tidemill.workers.sources.gguf_folder import unpack

WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
STATES = {"linear_value_head_dim": 32, "linear_num_value_heads": 4, "tie_word_embeddings": True}
MAMBA = {"hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama/odd", WIDTHS | {"hidden_size": 96}),
    "qwen2": ("qwen2", {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}),
    "qwen3": ("qwen3/stretched", WIDTHS | {"attention_bias": False}),
    "qwen3moe": ("qwen3_moe/all", WIDTHS | {"moe_intermediate_size": 32}),
    "qwen3next": (
        "qwen3_next/moe-two-values",
        WIDTHS | EXPERTS | STATES | {"decoder_sparse_step": 1, "attention_bias": False},
    ),
    "qwen35": ("qwen3_5/text", WIDTHS | STATES | {"num_hidden_layers": 4, "layer_types": None}),
    "qwen35moe": (
        "qwen3_5_moe/text",
        WIDTHS | EXPERTS | STATES | {"num_hidden_layers": 4, "layer_types": None},
    ),
    "gpt-oss": ("gpt_oss/narrow", {"hidden_size": 64, "intermediate_size": 64}),
    "granitehybrid": ("granitemoehybrid/moe", MAMBA | {"shared_intermediate_size": 64}),
    "granitehybrid, dense": (
        "granitemoehybrid/moe",
        MAMBA | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
}


def test_every_family_is_here() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_file_is_served_as_its_folder(name: str, cpu: Operators, half_cpu: Operators, tmp_path: Path) -> None:
    shape, changes = CASES[name]
    folder = save(random_model(shape, **changes), tmp_path / "folder")
    round_weights(folder)
    unpacked = unpack(convert(folder, tmp_path / "model.gguf"), tmp_path / "cache")
    subject = Subject(unpacked, cpu, half_cpu, tmp_path)
    subject.theirs = model_of(folder, torch.float32)
    for check in ("logits", "ranks", "sums"):
        CHECKS[check](subject)
