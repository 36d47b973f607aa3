"""The limit of a step counts the weights that its tokens read."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.engine.roofline import weight_bytes
from safetensors.torch import save_file


def test_step_reads_the_experts_that_its_tokens_draw(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_tok": 2}))
    weights = {"mlp.experts.into": torch.zeros(4, 8), "mlp.gate": torch.zeros(4, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    assert [weight_bytes(tmp_path, tokens) for tokens in (1, 2)] == pytest.approx([32 + 64, 32 + 96])
    assert weight_bytes(tmp_path, 100) == pytest.approx(32 + 128)
