"""Whether Triton interprets its kernels, on host memory, instead of compiling them for a device."""

from importlib import import_module
from importlib.util import find_spec


def interprets() -> bool:
    """As TRITON_INTERPRET=1 asks for: slow, and what the tests do where there is no device."""
    return find_spec("triton") is not None and bool(import_module("triton").knobs.runtime.interpret)
