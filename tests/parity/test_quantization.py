"""A model with `--quantization` has the bits of a folder with the values of its codes, and other keys."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.kernels.cases import relative_error
from tests.support.parity.architectures import random_model, save
from tests.support.parity.sharded import check, run_rank, run_threads
from tests.support.parity.steps import Runner
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.registry import ARCHITECTURES, load, no_progress, sizes_of
from tidemill.workers.models.loading.checkpoint import WeightsFolder
from tidemill.workers.models.loading.sharding import Replicated, part_of
from tidemill.workers.parallel.shared_memory import SharedMemory

PROMPT = [int(token) for token in torch.randint(2, 97, (40,), generator=torch.Generator().manual_seed(3))]


def dequantised(folder: Path, to: Path, quantization: Quantization) -> Path:
    """Save the values of the codes as floats."""
    raw = json.loads((folder / "config.json").read_text())
    weights = weights_of(ARCHITECTURES[raw["architectures"][0]].parse(raw))
    read = WeightsFolder(folder, no_progress, digests=True, quantize=quantization)
    read.check(weights, lambda _name: True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        values = read.read(name, part_of(Replicated(), weight.shape[0], 0, 1)).values
        tensors[name] = (values.mT if weight.transposed else values).contiguous()
    to.mkdir()
    (to / "config.json").write_text(json.dumps(raw))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "gpt_oss/alternating", "deepseek_v3"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8_per_block"])
def test_model_computes_with_the_values_of_its_codes(
    cpu: Operators, tmp_path: Path, name: str, quantization: Quantization, caplog: pytest.LogCaptureFixture
) -> None:
    floats = save(random_model(name), tmp_path / "floats")
    values = dequantised(floats, tmp_path / "values", quantization)
    caplog.set_level(logging.INFO, "tidemill")
    coded = load(floats, cpu, no_progress, quantization=quantization)
    assert "matrices computed with as stored: " in caplog.text
    wanted = load(values, cpu, no_progress)
    chunks = [len(PROMPT) - 2, 1, 1]
    assert torch.equal(Runner(coded, 16).run(PROMPT, chunks), Runner(wanted, 16).run(PROMPT, chunks))
    assert Runner(coded, 16).greedy(PROMPT, 8) == Runner(wanted, 16).greedy(PROMPT, 8)


def test_kinds_share_no_keys_and_take_fewer_bytes(cpu: Operators, tmp_path: Path) -> None:
    folder = save(random_model("llama"), tmp_path / "floats")
    kinds: list[Quantization | None] = [None, "int8", "w8a8", "w8a8_int8", "int4", "fp8", "fp8_per_block"]
    loaded = [load(folder, cpu, no_progress, quantization=kind).fingerprint for kind in kinds]
    assert len(set(loaded)) == len(kinds)
    assert load(folder, cpu, no_progress, quantization="int8").fingerprint == loaded[1]
    whole, int8, *_ = (sizes_of(folder, "float32", quantization=kind).weight_bytes for kind in kinds)
    assert int8 < whole / 2


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_groups_of_ranks_have_the_bits_of_integer_products(cpu: Operators, tmp_path: Path, name: str) -> None:
    """Each rank has the scale of whole rows; where ranks add up, that of its columns, and other keys."""
    folder = save(random_model(name), tmp_path / "floats")
    alone = run_rank(folder, cpu, quantization="w8a8")

    def met(place: str) -> Callable[[int], SharedMemory]:
        (tmp_path / place).mkdir()
        return partial(SharedMemory, tmp_path / place, size=2, wait_s_max=60)

    check(run_threads(folder, cpu, met("whole"), 2, quantization="w8a8"), alone)
    added = run_threads(folder, cpu, met("sums"), 2, sums=True, quantization="w8a8")
    assert torch.equal(added[1].hidden_TH, added[0].hidden_TH)
    assert added[0].fingerprint != alone.fingerprint
    assert 0 < relative_error(added[0].logits_TV, alone.logits_TV) < 0.3  # some tokens have other experts


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "gpt_oss/alternating", "deepseek_v3"])
def test_integer_products_are_near_and_the_same_on_every_path(
    cpu: Operators, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunks of a prompt do not matter, and the logits are near those of weights alone."""
    folder = save(random_model(name), tmp_path / "floats")
    caplog.set_level(logging.INFO)
    loaded = load(folder, cpu, no_progress, quantization="w8a8_int8")
    assert " w8a8" in caplog.text
    wanted = Runner(loaded, 16).run(PROMPT, [len(PROMPT)])
    for chunks in ([1] * len(PROMPT), [17, 20, 3]):
        assert torch.equal(Runner(loaded, 16).run(PROMPT, chunks)[-1], wanted[-1])
    values = load(folder, cpu, no_progress, quantization="int8_per_channel_weight_only")
    near = Runner(values, 16).run(PROMPT, [len(PROMPT)])
    assert not torch.equal(wanted, near)
    assert relative_error(wanted[-1], near[-1]) < 0.1
