"""Kernels are compiled on several processes, into a cache that outlives them."""

import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import triton.knobs
from triton.runtime.jit import JITFunction

from tests.support.kernels.launched import META
from tests.support.kernels.offline import Device, compiling
from tidemill.kernels import precompile
from tidemill.kernels.activation import cuda as activation_cuda
from tidemill.kernels.precompile import compile_ahead
from tidemill.kernels.rms_norm import cuda as rms_norm_cuda


def launch_four() -> None:
    x = torch.empty(8, 64, dtype=torch.bfloat16, device=META)
    activation_cuda.silu_mul(x)
    activation_cuda.silu_mul(x.float())
    rms_norm_cuda.rms_norm(x, x[0], 1e-6)
    rms_norm_cuda.add_norm(None, x, x[0], 1e-6)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that can only be compiled for; return Triton's empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Device())
    for kernel in (activation_cuda.silu_mul_part, rms_norm_cuda.norm_rows, rms_norm_cuda.add_norm_rows):
        kernel.device_caches.clear()
    return tmp_path


@pytest.mark.slow
def test_children_fill_the_cache_that_the_first_step_reads(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ahead(launch_four, 2)
    made = {path.name for path in device.iterdir()}
    assert len(list(device.rglob("*.cubin"))) == 4
    with compiling(monkeypatch) as kernels:
        launch_four()
    assert len(kernels) == 4
    assert {path.name for path in device.iterdir()} == made, "the step compiled nothing"


def test_kernels_that_are_in_the_cache_start_no_process(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Mock(**{"wait.return_value": 0})
    start = Mock(return_value=child)
    monkeypatch.setattr(precompile, "_compile_on_child", start)
    compile_ahead(launch_four, 3)
    (first, _), (second, _) = (call.args for call in start.call_args_list)
    assert len({*first, *second}) == 4, "two processes, each with two kernels"
    compile_ahead(launch_four, 3)
    assert start.call_count == 2
    child.wait.return_value = 1
    compile_ahead(lambda: (launch_four(), activation_cuda.silu_mul(torch.empty(8, 4096, device=META))), 3)
    assert start.call_count == 5
    assert len(list(device.iterdir())) == 1, "a process failed: its kernels are not in the cache"


@pytest.mark.usefixtures("device")
def test_nothing_is_launched_but_by_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, bool]] = []

    def run(_kernel: object, *_: object, warmup: bool, **_options: object) -> None:
        ran.append((threading.get_ident(), warmup))

    def launch_here_and_there() -> None:
        launch_four()
        other = threading.Thread(target=launch_four)
        other.start()
        other.join()

    monkeypatch.setattr(JITFunction, "run", run)
    compile_ahead(launch_here_and_there, 2)
    here = threading.get_ident()
    assert [warmup for thread, warmup in ran if thread == here] == [True] * 4
    assert [warmup for thread, warmup in ran if thread != here] == [False] * 4
    assert JITFunction.run is run
    assert triton.knobs.runtime.jit_cache_hook is None
