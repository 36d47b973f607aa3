"""Random weights need a config.json alone, and are the same for every worker and rank."""

import json
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch

from tidemill import LLM, SamplingParams
from tidemill.kernels.dispatch import REFERENCE
from tidemill.workers.models.architectures.registry import (
    compute_dtype_of,
    describe,
    has_head,
    load,
    no_progress,
)
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.dummy import HIGH, PERIOD, DummyWeights
from tidemill.workers.models.loading.sharding import RankSlice, Replicated
from tidemill.workers.models.loading.weights import Weight
from tidemill.workers.sources.names import bundled

KEEPER = bundled()["keeper"]


def weights(**shapes: tuple[int, ...]) -> DummyWeights:
    found = DummyWeights({"torch_dtype": "float32"}, no_progress)
    found.check({name: Weight(shape, Replicated()) for name, shape in shapes.items()}, lambda _: False)
    return found


def whole(rows: int) -> RankSlice:
    return RankSlice(((0, rows),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model without its weights."""
    copytree(KEEPER, tmp_path / "bare", ignore=ignore_patterns("*.safetensors"))
    return tmp_path / "bare"


def test_dummy_weights_are_a_function_of_their_name() -> None:
    values = weights(a=(40, 30), b=(40, 30)).read("a", whole(40)).codes
    assert torch.equal(values, weights(a=(40, 30)).read("a", whole(40)).codes)
    assert not torch.equal(values, weights(a=(40, 30), b=(40, 30)).read("b", whole(40)).codes)
    assert -HIGH <= values.min() < -0.9 * HIGH
    assert HIGH > values.max() > 0.9 * HIGH


def test_ranks_have_parts_of_the_same_dummy_weights() -> None:
    values = weights(a=(8, 6)).read("a", whole(8)).codes
    rows = weights(a=(8, 6)).read("a", RankSlice(((0, 2), (5, 6)), zeros=1)).codes
    assert torch.equal(rows, torch.cat([values[:2], torch.zeros(1, 6), values[5:6], torch.zeros(1, 6)]))
    columns = weights(a=(8, 6)).read("a", RankSlice(((3, 6),), dim=1)).codes
    assert torch.equal(columns, values[:, 3:])
    assert columns.is_contiguous()


def test_rows_of_a_large_dummy_tensor_differ() -> None:
    rows = PERIOD // 1024 + 3
    values = weights(a=(rows, 1024)).read("a", whole(rows)).codes
    assert len({row.numpy().tobytes() for row in values}) == rows


@pytest.mark.parametrize(("dtype", "expected"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_dummy_weights_have_the_type_that_the_config_names(folder: Path, dtype: str, expected: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))
    assert compute_dtype_of(folder, "dummy") == expected
    assert compute_dtype_of(folder, "dummy", on_cuda=True) == "bfloat16"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32"}))
    assert compute_dtype_of(folder, "dummy", on_cuda=True) == "float32"


def test_dummy_model_has_the_layers_but_not_the_fingerprint_of_the_real_one(folder: Path) -> None:
    real = load(KEEPER, REFERENCE, no_progress)
    done: list[tuple[int, int]] = []
    dummy = load(folder, REFERENCE, lambda at, of: done.append((at, of)), load_format="dummy")
    assert describe(folder, load_format="dummy") == describe(KEEPER)
    assert (dummy.layers, dummy.vocab_size, dummy.eos_ids) == (real.layers, real.vocab_size, real.eos_ids)
    assert dummy.fingerprint != real.fingerprint
    assert dummy.fingerprint == load(folder, REFERENCE, no_progress, load_format="dummy").fingerprint
    assert done[-1][0] == done[-1][1] > 0
    with pytest.raises(ModelError, match="safetensors"):
        load(folder, REFERENCE, no_progress)


def test_dummy_model_has_a_prediction_head_on_request(folder: Path) -> None:
    assert not has_head(folder, "dummy")
    assert load(folder, REFERENCE, no_progress, mtp=True, load_format="dummy").head is not None


def test_dummy_model_generates_tokens(folder: Path, kernel_cache: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, memory="16MiB", load_format="dummy", cache_folder=kernel_cache) as llm:
        (first,), (again,) = (llm.generate(["Hello"], params) for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert len(first.outputs[0].token_ids) == 8
