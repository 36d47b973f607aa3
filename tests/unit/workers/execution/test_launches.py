# pyright: basic
# Triton has no types.
"""Launches of released models' steps on a device, checked without one: a capture meets nothing that it
refuses, and the warm-up meets every kernel of later steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.engine.released import RELEASED
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernels.launched import META, Launch, capturing, launching
from tidemill.kernels.dispatch import operators
from tidemill.kvstore.layout import layout_of
from tidemill.workers.execution import model_runner as runner_module
from tidemill.workers.execution.cuda_graphs import Forward, Graphs, Replay, graph_shapes, padding
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.models.architectures.config import weights_of
from tidemill.workers.models.architectures.decoder import Decoder
from tidemill.workers.models.architectures.registry import ARCHITECTURES
from tidemill.workers.models.collectives import ALONE
from tidemill.workers.models.inputs import Caches, Inputs, caches_of, one_run

PAGE_TOKENS = 64
LAYERS = 6  # of every kind that the model has
ROWS_MAX = 600
TOKENS_MAX = 8192
TABLE_WIDTH = 640
DRAFTS_MAX = 5
BOX_MAX = 256  # elements of one dimension of a tile, what cuTensorMapEncodeTiled takes
STRIDE_BYTES_MAX = 1 << 40
STEP_LAUNCHES = 9  # embedding, angles and the first norm, whatever the number of layers

Model = tuple[Decoder, Caches]


@pytest.fixture(scope="module")
def model_of() -> Callable[[str], Model]:
    def made(name: str) -> Model:
        raw: dict[str, Any] = RELEASED[name] | {"num_hidden_layers": LAYERS}
        if "layer_types" in raw:
            raw["layer_types"] = raw["layer_types"][:LAYERS]
        config = ARCHITECTURES[raw["architectures"][0]].parse(raw)
        weights = weights_of(config)

        def read(name: str) -> torch.Tensor:
            return torch.empty(weights[name].shape, dtype=torch.bfloat16, device=META)

        layout = layout_of(config.specs, PAGE_TOKENS, "bfloat16")
        arena = torch.empty(8 * layout.extent_bytes, dtype=torch.uint8, device=META)
        model = Decoder(config, read, operators("triton", Path()), ALONE)
        return model, caches_of(layout, arena)

    return made


def there(inputs: Inputs, device: torch.device) -> Inputs:
    """on_device, of memory that cannot be pinned."""
    assert device == META
    return one_run(inputs, device)[1]


def captured(run: Forward) -> tuple[Replay, torch.Tensor]:
    run()
    with capturing():
        return lambda: None, run()


@pytest.mark.parametrize("name", RELEASED)
def test_graph_captures_work_that_reads_nothing_back(
    name: str, model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, caches = model_of(name)
    with launching(monkeypatch) as launches, torch.inference_mode():
        Graphs(
            lambda inputs: model.forward(inputs, caches),
            graph_shapes(8, 600, 3),
            9,
            META,
            captured,
            windows=caches.has_windows,
        )
    assert len(launches) > 2 * len(graph_shapes(8, 600, 3)) * LAYERS


def test_capture_refuses_what_a_device_would() -> None:
    numbers = torch.empty(3, device=META)
    for run in (
        lambda: numbers.sum().item(),
        lambda: numbers[numbers > 0],
        lambda: torch.tensor([1, 2], device=META),
        lambda: numbers + torch.ones(3).to(META),
        numbers.tolist,
        lambda: numbers[[0, 1]],
        lambda: numbers[torch.arange(2)],
    ):
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), capturing():
            run()


@pytest.mark.parametrize("name", RELEASED)
def test_driver_accepts_all_launches(
    name: str, model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the largest step, and one row of one token after a long text."""
    model, caches = model_of(name)
    with launching(monkeypatch) as launches, torch.inference_mode():
        for rows, first in ((1, 1), (ROWS_MAX, 1), (1, TOKENS_MAX), (ROWS_MAX, TOKENS_MAX - ROWS_MAX)):
            empty = padding(rows, TABLE_WIDTH, first, windows=caches.has_windows)
            model.forward(there(empty, META), caches)
    for launch in launches:
        x, *others = launch.grid
        assert 0 < x < 1 << 31, launch
        assert all(0 < size < 1 << 16 for size in others), launch
        for tile in launch.tiles:
            size = tile.base.element_size()
            assert 1 <= len(tile.shape) <= 5, launch
            assert all(0 < box <= BOX_MAX or at == 4 for at, box in enumerate(tile.block_shape)), launch
            assert tile.strides[-1] == 1, launch
            for stride in tile.strides[:-1]:
                assert stride * size % 16 == 0, launch
                assert 0 < stride * size < STRIDE_BYTES_MAX, launch
            for at in range(len(tile.shape) - 1):
                assert tile.strides[at] % tile.strides[at + 1] == 0, launch
                assert tile.strides[at] >= tile.strides[at + 1] * tile.shape[at + 1], launch


class Counted(TorchDispatchMode):
    """Counts torch's operators that run on a device: not views, not memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = operator(*args, **(kwargs or {}))
        is_view = any(argument.alias_info is not None for argument in operator._schema.arguments)
        name = operator.overloadpacket.__name__
        self.count += not (is_view or "empty" in name or name in {"_unsafe_view", "detach"})
        return result


LAUNCHES_PER_LAYER = {
    ("Qwen3-Next-80B-A3B", 1): 12,
    ("Qwen3-Next-80B-A3B", 32): 12,
    ("Qwen3-Next-80B-A3B", 128): 13,
    ("Qwen3-30B-A3B", 32): 13,
    ("gpt-oss-120b", 32): 12,
}


@pytest.mark.parametrize(("name", "rows"), LAUNCHES_PER_LAYER)
def test_decode_step_has_few_launches(
    name: str, rows: int, model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, caches = model_of(name)
    with launching(monkeypatch) as launches, torch.no_grad(), Counted() as counted:
        step = there(padding(rows, TABLE_WIDTH, windows=caches.has_windows), META)
        launches.clear()
        counted.count = 0
        model.forward(step, caches)
    assert (len(launches) + counted.count) / LAYERS <= LAUNCHES_PER_LAYER[name, rows] + STEP_LAUNCHES / LAYERS


STEPS = [
    (rows, more, (1, 2, 5, 1 + more)[(at + index) % 4] if more else 1, (1, 17, TABLE_WIDTH)[(at + index) % 3])
    for at, rows in enumerate((1, 3, 300, ROWS_MAX))
    for index, more in enumerate((0, 1, 15, 16, 300, 1500, 3000, TOKENS_MAX - ROWS_MAX))
]
"""Rows, tokens beyond one each, states that a row may keep, pages of a table."""


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "granite-4.0-h-small", "gpt-oss-20b", "DeepSeek-V3"])
def test_no_step_compiles(
    name: str, model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stop all requests for seconds."""
    model, caches = model_of(name)
    monkeypatch.setattr(runner_module, "on_device", there)
    runner = TorchRunner(model, caches, PAGE_TOKENS, 1, META)
    with launching(monkeypatch) as launches:
        runner.warm_up(ROWS_MAX, TOKENS_MAX, TABLE_WIDTH, DRAFTS_MAX)
        known = compiled(launches)
        for rows, more, states, width in STEPS:
            launches.clear()
            step = padding(rows, width, 1 + more, windows=caches.has_windows, states=states)
            with torch.inference_mode():
                runner._hidden(step)
            assert compiled(launches) <= known, (rows, more, states, width)
    runner.close()


def compiled(launches: list[Launch]) -> set[tuple[str, str]]:
    return {(launch.kernel, launch.compiled) for launch in launches}
