# pyright: reportUnknownVariableType=false
# safetensors leaves a type parameter of its paths open.
"""A tensor-parallel group computes the bits of one process. Of every architecture: test_architectures.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.parity.architectures import random_model, save
from tests.support.parity.sharded import WAIT_S_MAX, Found, check, run_rank, run_threads
from tidemill.kernels.dispatch import Operators
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.models.bundled import bundled
from tidemill.workers.models.errors import ModelError
from tidemill.workers.parallel.distributed import Distributed

ROOT = Path(__file__).parents[2]
FOUR_WAYS = {"vocab_size": 9, "linear_num_key_heads": 4, "linear_num_value_heads": 8}


def test_keeper_in_two_parts(cpu: Operators, tmp_path: Path) -> None:
    keeper = bundled()["keeper"]
    found = run_threads(keeper, cpu, lambda index: Distributed(tmp_path, index, 2, "gloo", WAIT_S_MAX), 2)
    alone = run_rank(keeper, cpu)
    check(found, alone)
    assert [rank.fingerprint for rank in found] == [alone.fingerprint, ""]


def test_error_of_a_group_names_the_sizes_that_share_the_heads() -> None:
    keeper = bundled()["keeper"]
    message = r"4 ranks cannot divide .*2 key, 4 query, 2 KV.*--tensor-parallel-size to 1 or 2$"
    with pytest.raises(ModelError, match=message):
        describe(keeper, 4)
    assert describe(keeper, 2) == describe(keeper)


@pytest.mark.slow
@pytest.mark.parametrize(("collectives", "size"), [("gloo", 2), ("shared-memory", 4)])
def test_processes(collectives: str, size: int, cpu: Operators, kernel_cache: Path, tmp_path: Path) -> None:
    folder = save(random_model("qwen3_next/moe-two-values", **FOUR_WAYS), tmp_path / "model")
    program = [sys.executable, "-m", "tests.support.parity.sharded", collectives]
    processes = [
        subprocess.Popen([*program, str(index), str(size), folder, tmp_path, kernel_cache], cwd=ROOT)
        for index in range(size)
    ]
    assert [process.wait() for process in processes] == [0] * size
    tensors = [load_file(tmp_path / f"found-{index}.safetensors") for index in range(size)]
    check([Found("", rank["hidden"], rank["logits"]) for rank in tensors], run_rank(folder, cpu))
