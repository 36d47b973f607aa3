# pyright: reportUnknownVariableType=false
# safetensors leaves a type parameter of its paths open.
"""A tensor-parallel group computes the bits of one process, whatever the model and the size of the group."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.sharded import MODELS, WAIT_S_MAX, hidden_and_logits, random_folder
from tidemill.kernels.dispatch import Operators
from tidemill.workers.models.bundled import bundled
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.registry import describe
from tidemill.workers.tp.distributed import Distributed
from tidemill.workers.tp.shared_memory import SharedMemory

ROOT = Path(__file__).parents[2]
Met = Distributed | SharedMemory


class Found(NamedTuple):
    fingerprint: str
    hidden_TH: torch.Tensor
    logits_TV: torch.Tensor


def run_threads(folder: Path, ops: Operators, meet: Callable[[int], Met], size: int) -> list[Found]:
    """What every rank finds, each on a thread with its own weights and caches."""

    def run(index: int) -> Found:
        with closing(meet(index)) as ranks:
            return Found(*hidden_and_logits(folder, ops, ranks))

    with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(run, range(size)))


def check(found: list[Found], alone: Found) -> None:
    assert float(alone.logits_TV.std()) > 0.3, "weights too small to tell right from wrong"
    for rank in found:
        assert torch.equal(rank.hidden_TH, alone.hidden_TH)
    assert torch.equal(found[0].logits_TV, alone.logits_TV)
    for rank in found[1:]:
        assert rank.logits_TV.shape == (len(alone.logits_TV), 0)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tmp_path_factory.mktemp("model") / "model", **MODELS[request.param])


@pytest.fixture
def alone(folder: Path, cpu: Operators) -> Found:
    return Found(*hidden_and_logits(folder, cpu))


@pytest.mark.parametrize("size", [2, 4])
def test_groups_compute_the_bits_of_one_process(
    folder: Path, alone: Found, cpu: Operators, size: int, tmp_path: Path
) -> None:
    found = run_threads(folder, cpu, lambda index: SharedMemory(tmp_path, index, size, WAIT_S_MAX), size)
    check(found, alone)
    assert [rank.fingerprint for rank in found] == [alone.fingerprint] + [""] * (size - 1)


def test_keeper_in_two_parts(cpu: Operators, tmp_path: Path) -> None:
    keeper = bundled()["keeper"]
    found = run_threads(keeper, cpu, lambda index: Distributed(tmp_path, index, 2, "gloo", WAIT_S_MAX), 2)
    check(found, Found(*hidden_and_logits(keeper, cpu)))


def test_a_group_that_cannot_share_the_heads_is_told_which_can() -> None:
    keeper = bundled()["keeper"]
    message = r"4 ranks cannot divide .*4 query, 2 key, 2 KV.*--tensor-parallel-size to 1 or 2$"
    with pytest.raises(ModelError, match=message):
        describe(keeper, 4)
    assert describe(keeper, 2) == describe(keeper)


@pytest.mark.parametrize(("collectives", "size"), [("gloo", 2), ("shared-memory", 4)])
def test_processes(collectives: str, size: int, cpu: Operators, kernel_cache: Path, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model", **MODELS["experts, one KV head"])
    program = [sys.executable, "-m", "tests.parity.sharded", collectives]
    processes = [
        subprocess.Popen([*program, str(index), str(size), folder, tmp_path, kernel_cache], cwd=ROOT)
        for index in range(size)
    ]
    assert [process.wait() for process in processes] == [0] * size
    tensors = [load_file(tmp_path / f"found-{index}.safetensors") for index in range(size)]
    check(
        [Found("", rank["hidden"], rank["logits"]) for rank in tensors],
        Found(*hidden_and_logits(folder, cpu)),
    )
