"""A tensor-parallel group computes the bits of one process. Of every architecture: test_architectures.py."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from tests.support.parity.architectures import random_model, save
from tests.support.parity.sharded import PAGE_TOKENS
from tests.support.parity.steps import Runner
from tidemill.kernels.dispatch import Operators
from tidemill.workers.models.architectures.registry import describe, load
from tidemill.workers.models.collectives import LEADER, Sharing
from tidemill.workers.models.errors import ModelError
from tidemill.workers.sources.names import bundled


def test_experts_are_whole_only_where_ranks_divide_them(tmp_path: Path) -> None:
    folder = save(random_model("granitemoehybrid/moe"), tmp_path / "model")
    describe(folder, 2)
    with pytest.raises(ModelError, match=r"2 ranks cannot divide 5 experts: leave out --enable-expert"):
        describe(folder, 2, by_expert=True)
    with pytest.raises(ModelError, match=r"has no experts: leave out --enable-expert-parallel$"):
        describe(bundled()["keeper"], 2, by_expert=True)


def padded(x_TN: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(x_TN, (0, width - x_TN.shape[1]))


def counted() -> Mock:
    """Return the first of two ranks: it counts its exchanges, and goes on with zeros from the other."""
    ranks = Mock(index=LEADER, size=2)
    ranks.reduce.side_effect = torch.clone
    ranks.gather.side_effect = ranks.gather_to_leader.side_effect = padded
    return ranks


@pytest.mark.parametrize(
    ("name", "shared", "mamba"),
    [
        ("llama", 0, 0),
        ("qwen3_moe/all", 0, 0),
        ("qwen3_next/dense-tied", 0, 0),
        ("qwen3_5_moe", 3, 0),
        ("gpt_oss", 0, 0),
        ("granitemoehybrid/dense", 0, 2),
        ("deepseek_v3/groups", 2, 0),
    ],
)
def test_exchanges_of_a_layer(name: str, shared: int, mamba: int, cpu: Operators, tmp_path: Path) -> None:
    """Four gathers, or two sums. Beside them a step has one for its embedding; without sums, a layer with a
    shared expert has one for it; with sums, a Mamba-2 layer has one for its norm."""
    folder = save(random_model(name), tmp_path / "model")
    for sums in (False, True):
        ranks = counted()
        loaded = load(folder, cpu, lambda _done, _total: None, Sharing(ranks, sums))
        runner, num_layers = Runner(loaded, PAGE_TOKENS), len(loaded.layers)
        runner.step([(runner.add([3, 4, 5]), 3)])
        assert ranks.reduce.call_count == (2 * num_layers if sums else 0)
        assert ranks.gather.call_count == 1 + (mamba if sums else 4 * num_layers + shared)


def test_error_of_a_group_names_the_sizes_that_share_the_heads() -> None:
    keeper = bundled()["keeper"]
    message = r"4 ranks cannot divide .*2 key, 4 query, 2 KV.*--tensor-parallel-size to 1 or 2$"
    with pytest.raises(ModelError, match=message):
        describe(keeper, 4)
    assert describe(keeper, 2) == describe(keeper)
