"""Compiles every cpu.cpp into one shared object, once per source, compiler and CPU, and loads it."""

import ctypes
import fcntl
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
# No fast-math, and no contraction: a loop must have the same bits vectorised or not (see cpu.h).
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
PROTOTYPE = re.compile(r'extern "C" (void|int64_t) (\w+)\(([^)]*)\)\s*\{')


class KernelUnavailable(Exception):
    """The wanted variant of an operator cannot run here; the message says what to install or to pass."""


class Library:
    """The loaded shared object; argument types are read off the C++ sources, the one place that has them."""

    def __init__(self, path: Path, sources: list[Path]) -> None:
        # The library binds to the OpenMP runtime that torch has loaded: one thread count rules both.
        assert torch.get_num_threads() > 0
        self._library = ctypes.CDLL(str(path))
        self._prototypes = {
            name: (result, arguments)
            for source in sources
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


def build(cache_dir: Path, compiler: str = "g++") -> Library:
    """The kernels for this machine, compiled into `cache_dir` unless they are there; or KernelUnavailable."""
    path = shutil.which(compiler)
    if path is None:
        raise KernelUnavailable(
            f"no C++ compiler for the cpu kernels: install {compiler}, or pass --kernels reference"
        )
    sources = sorted(FOLDER.glob("*/cpu.cpp"))
    # What -march=native stands for is part of the name: a cache directory may be shared by unequal machines.
    target = _run([path, "-march=native", "-Q", "--help=target", "--version"])
    digest = hashlib.sha256("\0".join((*FLAGS, target)).encode())
    for source in (FOLDER / "cpu.h", *sources):
        digest.update(source.read_bytes())
    cache_dir.mkdir(parents=True, exist_ok=True)
    built = cache_dir / f"kernels-{digest.hexdigest()[:16]}.so"
    with (cache_dir / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(path, sources, built)
    return Library(built, sources)


def _compile(compiler: str, sources: list[Path], built: Path) -> None:
    """As one unit, which parses the shared header once; a crash leaves no half-written library."""
    unit = "".join(f'#include "{source}"\n' for source in sources)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        _run([compiler, *FLAGS, "-x", "c++", "-", "-o", str(made)], unit)
        made.replace(built)


def _run(command: list[str], text: str = "") -> str:
    # The command is a compiler found on PATH with constant flags.
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise KernelUnavailable(
            f"{command[0]} cannot compile the cpu kernels, pass --kernels reference: {done.stderr[-2000:]}"
        )
    return done.stdout
