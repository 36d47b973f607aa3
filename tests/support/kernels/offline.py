"""Compiles what an operator launches, on a machine without a device, and reads what came out."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES_MAX = {80: 166_912, 89: 101_376, 90: 232_448}
"""By capability, of a program."""


@dataclass(frozen=True, slots=True)
class Device:
    """The part of a driver that compiling needs. Triton keeps what it compiled by device."""

    capability: int = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel. Counts are of instructions for ptxas, which has one in machine code for each of these."""

    name: str
    registers: int
    stack_bytes: int  # spilled registers and arrays that ended up in memory
    shared_bytes: int
    wgmma: int
    tma: int  # loads by the copy engine


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> Generator[list[Compiled]]:
    """Inside, a launch compiles and does not run: call the operator with host tensors. Yields the kernels."""
    launched: list[Compiled] = []
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, **options: Any) -> Any:  # noqa: ANN401
        kernel = run(self, *arguments, grid=grid, **{**options, "warmup": True})
        launched.append(_read(self.fn.__name__, kernel))
        return kernel

    active = triton.runtime.driver
    with monkeypatch.context() as patch:
        patch.setattr(active, "_active", Device(capability))
        patch.setattr(JITFunction, "run", compile_only)
        yield launched


def _read(name: str, kernel: Any) -> Compiled:  # noqa: ANN401
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    code: str = kernel.asm["ptx"]
    return Compiled(
        name=name,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
        wgmma=code.count("wgmma.mma_async"),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", code)),
    )


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([BINARIES / tool, *arguments], check=True, capture_output=True, text=True).stdout
