"""The ranks of a group on CUDA devices, without one: all of them warm up and capture in the same order, and
every exchange in it meets the same exchange on the other ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.kernels.launched import META, capturing, launching
from tests.support.workers.released import LAYERS, PAGE_TOKENS, released, there
from tidemill.workers.execution import model_runner
from tidemill.workers.execution.cuda_graphs import Forward, Replay, graph_shapes
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.models.loading.sharding import RankPart

ROWS_MAX, TOKENS_MAX, TABLE_WIDTH = 8, 600, 9
MODELS = {
    "Qwen3-Next-80B-A3B": (2, 0, True),
    "gpt-oss-120b": (4, 0, True),
    "DeepSeek-V3": (4, 0, True),
    "Qwen3-32B": (4, 0, False),
    "granite-4.0-h-small": (4, 1, True),
}
"""The number of ranks, the exchanges of a recurrent layer beside its two sums, and whether it has experts."""


@dataclass
class Recorded:
    """A rank whose exchanges have shapes and no values: it records what it would do on a device."""

    index: int
    size: int
    did: list[tuple[Any, ...]] = field(default_factory=list)

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        return self._recorded("gather", x_TN, width)

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        found = self._recorded("gather to leader", x_TN, width)
        return found if self.index == 0 else found[:, :0]

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        return self._recorded("reduce", x_TN, x_TN.shape[1])

    def broadcast(self, x: torch.Tensor) -> None:
        del x
        raise AssertionError("a decision of the leader goes through host memory")

    def _recorded(self, kind: str, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        assert x_TN.device == META
        self.did.append((kind, tuple(x_TN.shape), width, x_TN.dtype))
        return torch.empty(len(x_TN), width, dtype=x_TN.dtype, device=META)


def order_of_rank(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch, *, by_expert: bool
) -> list[tuple[Any, ...]]:
    """Return what a rank does from its warm-up to its last graph: launches, exchanges, captures."""
    size, _, _ = MODELS[name]
    ranks, part = Recorded(index, size), RankPart(index, size, sums=True, by_expert=by_expert)
    model, caches = released(name, part, ranks, counts=by_expert and not index)

    def capture(run: Forward) -> tuple[Replay, torch.Tensor]:
        run()
        ranks.did.append(("capture begins",))
        with capturing():
            found = run()
        ranks.did.append(("capture ends",))
        return lambda: None, found

    monkeypatch.setattr(model_runner, "on_device", there)
    runner = TorchRunner(model, caches, PAGE_TOKENS, 1, META)
    with launching(monkeypatch) as launches:
        runner.warm_up(ROWS_MAX, TOKENS_MAX, TABLE_WIDTH)
        warmed = len(ranks.did)
        runner.use_graphs(graph_shapes(ROWS_MAX, TOKENS_MAX, 0), TABLE_WIDTH, capture)
    runner.close()
    assert len(launches) > LAYERS
    assert 0 < warmed < len(ranks.did)
    return ranks.did


QUICK = {("Qwen3-Next-80B-A3B", False), ("DeepSeek-V3", True)}
"""A model with recurrent layers, and one whose experts are whole."""


def _cases() -> Iterator[object]:
    for name, (*_, has_experts) in MODELS.items():
        for by_expert in (False, True)[: 1 + has_experts]:
            marks = [] if (name, by_expert) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, by_expert, marks=marks)


@pytest.mark.parametrize(("name", "by_expert"), [*_cases()])
def test_ranks_warm_up_and_capture_in_the_same_order(
    name: str, monkeypatch: pytest.MonkeyPatch, *, by_expert: bool
) -> None:
    size, more, _ = MODELS[name]
    orders = [order_of_rank(name, index, monkeypatch, by_expert=by_expert) for index in range(size)]
    assert all(order == orders[0] for order in orders[1:])
    starts = [at for at, did in enumerate(orders[0]) if did[0] == "capture begins"]
    ends = [at for at, did in enumerate(orders[0]) if did[0] == "capture ends"]
    assert len(starts) == len(ends) == len(graph_shapes(ROWS_MAX, TOKENS_MAX, 0))
    for start, end in zip(starts, ends, strict=True):
        kinds = [did[0] for did in orders[0][start + 1 : end]]
        assert kinds.count("reduce") == 2 * LAYERS
        assert 0 <= kinds.count("gather") - 1 <= more * LAYERS, "the embedding, and norms of Mamba-2"
