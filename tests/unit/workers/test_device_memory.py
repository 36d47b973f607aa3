"""The memory of a worker on a device: what is left for pages and states, and what does not fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benchmarks.engine.released import RELEASED

from tests.support.kvstore.fake_vmm import FakeVmm
from tests.support.workers.settings import plain_settings
from tidemill.kernels.dispatch import operators
from tidemill.kernels.shared.build import KernelUnavailable
from tidemill.workers.engine import build
from tidemill.workers.engine.build import build_engine, check_settings
from tidemill.workers.engine.memory_plan import DeviceMemory, arena_bytes, budget_of
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.messages import EngineInfo
from tidemill.workers.models.architectures.config import weight_bytes
from tidemill.workers.models.architectures.registry import ARCHITECTURES
from tidemill.workers.settings import EngineSettings, SettingsError

MIB, GB = 1 << 20, 10**9
H100, H200 = 85 * GB, 150 * GB
settings_with = partial(plain_settings, device="cuda", backing="fixed")


@pytest.mark.parametrize(
    ("changes", "used", "left"),
    [
        ({}, {}, 900 - 500 - 50 - 30),
        ({"gpu_memory_utilization": 0.8}, {}, 800 - 580),
        ({"gpu_memory_utilization": 1.0}, {}, 1000 - 580),
        ({}, {"graphs": 130, "free": 320}, 900 - 680),
        ({}, {"free": 200}, 180),  # others use the device
        ({"memory_bytes": 100}, {}, 100),
        ({"memory_bytes": 320}, {}, 320),
        ({"device_share": 0.7}, {}, 630 - 580),
        ({"device_share": 0.7}, {"free": 0}, 630 - 580),  # others have borrowed it
    ],
)
def test_arena_has_what_is_left(changes: dict[str, Any], used: dict[str, int], left: int) -> None:
    sizes = {"total": 1000, "free": 420, "weights": 500, "steps": 50, "graphs": 30} | used
    settings = settings_with(**changes)
    assert arena_bytes(settings, DeviceMemory(name="cuda:0", **sizes), 40) == left


@pytest.mark.parametrize(
    ("changes", "used", "line"),
    [
        ({}, {"weights": 900}, r"weights take 900.*one request 40.*, with 0\.00 GiB left"),
        ({}, {"steps": 400}, r"steps 400.*one request"),
        ({}, {"graphs": 400}, r"CUDA graphs 400.*one request"),
        ({}, {"free": 40}, r"one request 40.*, with 36\.00 GiB left: stop what else uses the device"),
        ({"memory_bytes": 321 << 30}, {}, r"--memory 321.*set it to 327680MiB or less"),
        ({"memory_bytes": 181 << 30}, {"free": 200}, r"--memory 181.*set it to 184320MiB or less"),
        ({"device_share": 0.5}, {}, r"grants 450.00 GiB of 1000.00 GiB.*one request"),
    ],
)
def test_what_does_not_fit_is_refused_with_all_sizes(
    changes: dict[str, Any], used: dict[str, int], line: str
) -> None:
    sizes = {"total": 1000, "free": 420, "weights": 500, "steps": 50, "graphs": 30} | used
    settings = settings_with(**changes)
    device = DeviceMemory(name="cuda:0", **{name: size << 30 for name, size in sizes.items()})
    with pytest.raises(SettingsError, match=line) as refused:
        arena_bytes(settings, device, 40 << 30)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "total", "fits"),
    [
        ("granite-4.0-h-small", H100, True),
        ("Qwen3.5-35B-A3B", H200, True),
        ("Qwen3-Next-80B-A3B", H100, False),
        ("Qwen3-Next-80B-A3B", H200, False),
        ("gpt-oss-120b", H200, False),
    ],
)
def test_released_models_on_one_device(model: str, total: int, *, fits: bool) -> None:
    raw = RELEASED[model]
    weights = weight_bytes(ARCHITECTURES[raw["architectures"][0]].parse(raw), "bfloat16")
    device = DeviceMemory(name="cuda:0", total=total, free=total - weights, weights=weights)
    settings = settings_with()
    if model == "Qwen3-Next-80B-A3B":
        assert weights / GB == pytest.approx(159.3, abs=0.1)
    if fits:
        assert arena_bytes(settings, device, GB) > 5 * GB
        return
    with pytest.raises(SettingsError, match="weights take"):
        arena_bytes(settings, device, GB)


@pytest.mark.parametrize(("device", "tokens", "rows"), [("cpu", 512, 128), ("cuda", 8192, 256)])
def test_steps_are_larger_on_a_device(device: str, tokens: int, rows: int) -> None:
    budget = budget_of(settings_with(device=device), 64)
    assert (budget.tokens_max, budget.rows_max) == (tokens, rows)
    budget = budget_of(settings_with(device=device, max_num_batched_tokens=1000, max_num_seqs=7), 64)
    assert (budget.tokens_max, budget.rows_max) == (1000, 7)


@dataclass
class FakeDevice:
    """A CUDA device on the host: `own` is the memory of this process, `others` that of all others."""

    total: int = 256 * MIB
    others: int = 0
    own: int = 0
    weights: int = 40 * MIB
    steps: int = 10 * MIB
    graphs: int = 6 * MIB
    loaded: bool = False
    grown: int = 0  # what others take while graphs are captured
    kept: int = 0  # of steps that ended, which torch keeps for the next ones

    def settle(self, *_: object) -> None:
        self.own, self.kept = self.own - self.kept, 0

    def info(self, _device: object) -> tuple[int, int]:
        return self.total - self.others - self.own, self.total


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake, load, close = FakeDevice(), build.load, TorchRunner.close
    reference = operators("reference", Path("nowhere"))

    def loading(*arguments: Any, **more: Any) -> Any:  # noqa: ANN401 - those of load
        fake.loaded, fake.own = True, fake.own + fake.weights
        return load(*arguments, **more)

    def take(name: str) -> Callable[..., None]:
        def taking(runner: TorchRunner, *_: object) -> None:
            fake.own += getattr(fake, name)
            if name == "steps":
                fake.kept = fake.steps
                return
            fake.settle()  # as torch does before it captures
            runner.taken = fake.graphs  # pyrefly: ignore[missing-attribute]
            fake.others += fake.grown

        return taking

    def closing(runner: TorchRunner) -> None:
        fake.own -= getattr(runner, "taken", 0)
        close(runner)

    def total(_device: torch.device) -> int:
        return fake.total

    def own(_device: torch.device) -> int:
        return fake.own

    host = Mock(return_value=torch.device("cpu"))
    for module in ("device", "engine.build"):
        monkeypatch.setattr(f"tidemill.workers.{module}.device_of", host)
    monkeypatch.setattr(build, "total_memory", total)
    monkeypatch.setattr(build, "operators_of", Mock(return_value=reference))
    monkeypatch.setattr(build, "load", loading)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fake.info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", own)
    monkeypatch.setattr("tidemill.workers.engine.runners.settle", fake.settle)
    monkeypatch.setattr(TorchRunner, "compile_ahead", Mock())
    monkeypatch.setattr(TorchRunner, "warm_up", take("steps"))
    monkeypatch.setattr(TorchRunner, "use_graphs", take("graphs"))
    monkeypatch.setattr(TorchRunner, "close", closing)
    monkeypatch.setattr("tidemill.kvstore.memory.backing._installed_vmm_ops", FakeVmm)
    return fake


def info_of(fake: FakeDevice, settings: EngineSettings) -> EngineInfo:
    """Start a worker on a device, and return its facts."""
    fake.own = fake.kept = 0
    built = build_engine(settings, lambda _done, _total: None)
    built.close()
    return built.info


@pytest.mark.parametrize("backing", ["fixed", "kvcached"])
def test_worker_takes_what_its_trial_leaves(fake: FakeDevice, backing: str) -> None:
    settings = settings_with(backing=backing)
    info = info_of(fake, settings)
    left = int(fake.total * 0.9) - fake.weights - fake.steps - fake.graphs
    assert 0 <= left - info.memory_bytes < 8 * MIB, "whole extents"
    assert info.memory_max_bytes == info.memory_bytes
    eager = info_of(fake, replace(settings, enforce_eager=True))
    assert abs(eager.memory_bytes - info.memory_bytes - fake.graphs) < 8 * MIB
    fake.others = 100 * MIB  # of other programs
    left = int((fake.total - fake.others - fake.weights - fake.steps - fake.graphs) * 0.9)
    assert abs(left - info_of(fake, settings).memory_bytes) < 8 * MIB


def test_memory_of_a_worker_on_a_shared_device_is_its_share(fake: FakeDevice) -> None:
    """Another worker starts and grows meanwhile, by a share that it has or has borrowed."""
    settings = settings_with(backing="kvcached", device_share=0.5)
    settings = replace(settings, memory_broker=True)
    wanted = info_of(fake, settings)
    fake.others, fake.grown = 60 * MIB, 40 * MIB
    info = info_of(fake, settings)
    assert info.memory_bytes == wanted.memory_bytes
    left = int(fake.total * 0.45) - fake.weights - fake.steps - fake.graphs
    assert 0 <= left - info.memory_bytes < 8 * MIB
    assert info.memory_max_bytes > 3 * info.memory_bytes, "it may borrow what the others leave"


def test_memory_that_is_asked_for_is_compared_with_what_is_left(fake: FakeDevice) -> None:
    settings = settings_with(memory_bytes=100 * MIB)
    assert 0 <= 100 * MIB - info_of(fake, settings).memory_bytes < 8 * MIB
    fake.graphs = 100 * MIB
    with pytest.raises(SettingsError, match=r"CUDA graphs 0\.10 GiB, and --memory 0\.10 GiB: set it to"):
        build_engine(settings, lambda _done, _total: None)
    assert fake.loaded, "graphs are known at the end"


def test_weights_that_do_not_fit_are_not_loaded(fake: FakeDevice) -> None:
    settings = settings_with()
    check_settings(settings, here=True)
    fake.others = fake.total - 2 * MIB  # of other programs
    with pytest.raises(SettingsError, match=r"weights take .* stop what else uses the device"):
        build_engine(settings, lambda _done, _total: None)
    fake.total = 2 * MIB
    with pytest.raises(SettingsError, match=r"weights take .*serve a smaller model"):
        check_settings(settings, here=True)
    check_settings(settings)  # the device of another machine may be larger
    assert not fake.loaded


def test_model_whose_tiles_do_not_fit_the_gpu_is_refused_by_name(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfResources(Exception):
        """The name of Triton's error."""

    refused = Mock(
        side_effect=OutOfResources("out of resource: shared memory, Required: 9, Hardware limit: 5")
    )
    monkeypatch.setattr(TorchRunner, "warm_up", refused)
    settings = settings_with()
    with pytest.raises(SettingsError, match=r"Required: 9, .* use a GPU with more shared memory") as raised:
        info_of(fake, settings)
    assert str(settings.model_folder) in str(raised.value)


def test_model_that_a_library_of_kernels_does_not_take_is_refused_in_its_words(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--attention-backend flashinfer takes keys beside values, and this model has latents"
    monkeypatch.setattr(TorchRunner, "warm_up", Mock(side_effect=KernelUnavailable(words)))
    with pytest.raises(SettingsError, match=words):
        info_of(fake, settings_with())
