"""Detect Triton's interpreter, which runs kernels on host memory instead of compiling them for a device."""

from importlib import import_module
from importlib.util import find_spec


def interprets() -> bool:
    """Return whether TRITON_INTERPRET=1 is set: it is slow, and the tests use it where there is no device."""
    return find_spec("triton") is not None and bool(import_module("triton").knobs.runtime.interpret)
