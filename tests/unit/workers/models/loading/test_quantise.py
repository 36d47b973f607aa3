"""`--quantization`: codes of near values, the same for all ranks."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file

from tests.support.workers.quantised import NAME, fp8_in_blocks, opened
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.qwen3 import parse_llama
from tidemill.workers.models.architectures.registry import no_progress
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.checkpoint import WeightsFolder
from tidemill.workers.models.loading.quantise import RECIPES, Recipe, quantised, recipe_of
from tidemill.workers.models.loading.sharding import EvenRuns, Replicated, part_of
from tidemill.workers.models.loading.weights import Weight

EVERY: tuple[Quantization, ...] = get_args(Quantization)
ERRORS = {"fp8": 1 / 16, "int8": 0.51 / 127, "w8a8": 0.51 / 127, "int4": 1 / 8}
"""The largest error, of FP8 of the value, else of the largest value of its block."""


def folder_with(folder: Path, tensor: torch.Tensor, quantize: Quantization | None) -> WeightsFolder:
    save_file({NAME: tensor}, folder / "model.safetensors")
    found = WeightsFolder(folder, no_progress, digests=True, quantize=quantize)
    found.check({NAME: Weight(tuple(tensor.shape), Replicated())}, lambda _name: False)
    return found


@pytest.mark.parametrize("quantization", EVERY)
@pytest.mark.parametrize("shape", [(300, 256), (2, 5, 1440)])
def test_codes_are_near_the_values(quantization: Quantization, shape: tuple[int, ...]) -> None:
    recipe = RECIPES[quantization]
    floats = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    floats[..., 3, :] = 0
    found = quantised(plain(floats), recipe)
    group = found.group
    assert recipe.columns in {0, group} or group == recipe.columns_of(Weight(shape, Replicated()))
    assert found.num_bytes == recipe.num_bytes(Weight(shape, Replicated()))
    largest = floats.float().abs().unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)
    size = floats.float().abs() if recipe.kind == "fp8" and recipe.rows == 1 else largest.amax()
    error = (found.values - floats.float()).abs()
    assert (error <= ERRORS[recipe.kind] * size + 1e-2 * largest.amax() / 448).all()
    assert (found.values[..., 3, :] == 0).all()
    if recipe.rows == 1:
        assert (error <= ERRORS[recipe.kind] * largest).all()


@pytest.mark.parametrize("quantization", EVERY)
def test_ranks_have_the_codes_of_the_whole(tmp_path: Path, quantization: Quantization) -> None:
    floats = torch.randn(130, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    folder = folder_with(tmp_path, floats, quantization)
    whole = folder.read(NAME, part_of(Replicated(), 130, 0, 1)).values
    for dim in (0, 1):
        parts = [folder.read(NAME, part_of(EvenRuns(dim=dim), floats.shape[dim], i, 2)) for i in range(2)]
        assert all(part.scales is not None for part in parts)
        assert torch.equal(torch.cat([part.values for part in parts], dim), whole)
    again = folder_with(tmp_path, floats, quantization)
    assert torch.equal(again.read(NAME, part_of(Replicated(), 130, 0, 1)).values, whole)


def test_vectors_gates_and_what_is_narrow_stay_floats() -> None:
    assert recipe_of(Weight((8, 64), Replicated()), "fp8_per_block") == RECIPES["fp8_per_block"]
    assert recipe_of(Weight((8, 64), Replicated(), role="precise"), "int8") is None
    assert recipe_of(Weight((8, 64), Replicated(), role="vocabulary"), "fp8_per_block") is None
    assert recipe_of(Weight((8, 64), Replicated(), role="vocabulary"), "int4") == Recipe("int8")
    assert recipe_of(Weight((64,), Replicated()), "int8") is None
    assert recipe_of(Weight((64, 1, 4), Replicated()), "int8") is None
    assert recipe_of(Weight((64, 40), Replicated()), "int4") is None
    assert recipe_of(Weight((64, 64), Replicated()), None) is None


def test_names_with_integer_products_leave_the_head_to_others() -> None:
    head = Weight((8, 64), Replicated(), role="vocabulary")
    assert [recipe_of(head, name) for name in ("w8a8", "w8a8_int8")] == [Recipe("int8"), None]
    found = quantised(plain(torch.ones(8, 64)), RECIPES["w8a8_int8"])
    assert (found.kind, found.weight_only.kind) == ("w8a8", "int8")
    assert torch.equal(found.weight_only.codes, found.codes)


def test_folder_that_is_quantised_is_refused(tmp_path: Path) -> None:
    case = fp8_in_blocks(torch.Generator().manual_seed(0))
    opened(tmp_path, case)
    with pytest.raises(ModelError, match=r"is quantised already \(fp8\): leave out --quantization int8$"):
        WeightsFolder(tmp_path, no_progress, digests=True, quantization=case.config, quantize="int8")


LOAD = """
import sys, threading
from dataclasses import replace
from pathlib import Path
from tidemill.workers.device import HOST
from tidemill.workers.engine.build import load_model, operators_of, weight_bytes
from tidemill.workers.malloc import keep_freed_memory
from tidemill.workers.settings import EngineSettings

def own_bytes():  # mapped pages of the file are the system's
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def sample():
    while not ended.wait(0.001):
        seen.append(own_bytes())

keep_freed_memory()  # as a worker does
small, folder, kernels, quantization = sys.argv[1:]
settings = EngineSettings(
    model_folder=Path(small),
    cache_folder=Path(kernels),
    store_url="memory:",
    quantization=quantization,
    compute_dtype="bfloat16",
)
ops = operators_of(settings)
load_model(settings, lambda _done, _total: None, ops, HOST, None)
seen, ended = [own_bytes()], threading.Event()
sampling = threading.Thread(target=sample)
sampling.start()
settings = replace(settings, model_folder=Path(folder))
loaded = load_model(settings, lambda _done, _total: None, ops, HOST, None)
ended.set()
sampling.join()
print(weight_bytes(settings), max(seen) - seen[0], len(seen))
"""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def random_llama(folder: Path, layers: int) -> Path:
    raw = LLAMA | {"num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    weights, floats = weights_of(parse_llama(raw)), torch.randn(4096 * 768).bfloat16()
    save_file(
        {name: floats[: prod(weight.shape)].view(weight.shape).clone() for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_peak_of_a_worker_is_the_size_of_the_codes_and_a_tenth(
    tmp_path: Path, kernel_cache: Path, quantization: str
) -> None:
    """Beside what its process has when it has loaded a small model."""
    folders = [random_llama(tmp_path / str(layers), layers) for layers in (1, 24)]
    command = [sys.executable, "-c", LOAD, *map(str, folders), str(kernel_cache), quantization]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    stored, peak, samples = map(int, ended.stdout.split())
    assert samples > 100
    assert 0.9 * stored < peak < 1.1 * stored
