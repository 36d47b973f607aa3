"""The compiled kernels: made ahead, or once per source, compiler and CPU; found, and loaded."""

import ctypes
import fcntl
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from tidemill.kernels.shared.compiler import (
    FOLDER,
    KERNELS,
    REPLAY,
    KernelUnavailable,
    Program,
    compile_into,
    compiler_path,
    found_ahead,
    library_name,
    native_target,
    prototypes,
)

__all__ = ["KernelUnavailable", "Library", "build"]

ArgumentType: TypeAlias = "type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]"
AHEAD = FOLDER / "ahead"  # of a wheel: setup.py fills it


Call = tuple[int, tuple[float | None, ...]]
"""A call of a function: its index, and its arguments."""


class Library:
    """The loaded shared object; argument types are read off the C++ sources, the one place that has them."""

    def __init__(self, path: Path, program: Program = KERNELS) -> None:
        self.recording: Recording | None = None
        self._library = ctypes.CDLL(str(path))
        self._prototypes = prototypes(program)

    def function(self, name: str) -> Callable[..., int | None]:
        """A C function: pass addresses (or None for null), ints and floats; it returns None, or an int64."""
        result, arguments = self._prototypes[name]
        function = self._library[name]
        function.argtypes = [_argument_type(argument) for argument in arguments]
        function.restype = None if result == "void" else ctypes.c_int64
        if result != "void":
            return function
        index = list(self._prototypes).index(name)

        def call(*given: float | None) -> None:
            if self.recording is not None:
                self.recording.called(index, given)
            function(*given)

        return call

    def words(self, calls: Sequence[Call]) -> list[int]:
        """Return the calls as `replay` takes them: of each its index, then its arguments."""
        kinds = [
            [_argument_type(argument) for argument in arguments] for _, arguments in self._prototypes.values()
        ]
        words: list[int] = []
        for index, given in calls:
            assert len(kinds[index]) == len(given)
            words += (index, *map(_word, kinds[index], given))
        return words

    def replay(self, words: int, calls: int) -> None:
        """Make the calls at the address `words` again, in one call and without the interpreter's lock."""
        function = self._library[REPLAY]
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
        function(words, calls)


class Recording(Protocol):
    def called(self, index: int, given: tuple[float | None, ...]) -> None:
        """Record that a function is called."""
        ...


def _word(kind: ArgumentType, value: float | None) -> int:
    """Return an argument as it lies in 64 bits."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0)


def _argument_type(argument: str) -> ArgumentType:
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
        return Library(made, program)
    target = native_target(compiler_path(compiler))
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelUnavailable(
            f"{cache_dir} cannot be made for compiled kernels ({error.strerror}): set XDG_CACHE_HOME"
        ) from error
    built = cache_dir / library_name(target.name, program)
    if built.exists():  # no wait for the compilation of other sources, which may take minutes
        return Library(built, program)
    with (cache_dir / f"{program.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_into(built, cache_dir / "objects", target, program)
    return Library(built, program)


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
