"""The compiled kernels: made ahead, or once per source, compiler and CPU; found, and loaded."""

import ctypes
import fcntl
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tidemill.kernels.shared.compiler import (
    FOLDER,
    KERNELS,
    KernelUnavailable,
    Program,
    compile_into,
    compiler_path,
    found_ahead,
    library_name,
    native_target,
    sources,
)

__all__ = ["KernelUnavailable", "Library", "build"]

AHEAD = FOLDER / "ahead"  # of a wheel: setup.py fills it
PROTOTYPE = re.compile(r'extern "C" (void|int64_t) (\w+)\(([^)]*)\)\s*\{')


class Library:
    """The loaded shared object; argument types are read off the C++ sources, the one place that has them."""

    def __init__(self, path: Path, made_of: list[Path]) -> None:
        self._library = ctypes.CDLL(str(path))
        self._prototypes = {
            name: (result, arguments)
            for source in made_of
            for result, name, arguments in PROTOTYPE.findall(source.read_text())
        }

    def function(self, name: str) -> Callable[..., int | None]:
        """A C function: pass addresses (or None for null), ints and floats; it returns None, or an int64."""
        result, arguments = self._prototypes[name]
        function = self._library[name]
        function.argtypes = [
            _argument_type(argument) for argument in arguments.split(",") if argument.strip()
        ]
        function.restype = None if result == "void" else ctypes.c_int64
        return function


def _argument_type(argument: str) -> type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]:
    if "*" in argument:
        return ctypes.c_void_p
    return {"int64_t": ctypes.c_int64, "float": ctypes.c_float}[argument.split(maxsplit=1)[0]]


def build(cache_dir: Path, compiler: str = "g++", ahead: Path = AHEAD, program: Program = KERNELS) -> Library:
    """A program for this machine: from `ahead` if it is there, else compiled into `cache_dir`, once. Raises
    KernelUnavailable."""
    # The kernels bind to the OpenMP runtime that torch has loaded: one thread count rules both.
    assert "-fopenmp" not in program.flags or "torch" in sys.modules
    made = found_ahead(ahead, platform.machine(), _cpuinfo(), program)
    if made is not None:
        return Library(made, sources(program))
    path = compiler_path(compiler)
    cache_dir.mkdir(parents=True, exist_ok=True)
    built = cache_dir / library_name(native_target(path), program)
    with (cache_dir / f"{program.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_into(built, ["-march=native"], path, program)
    return Library(built, sources(program))


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
