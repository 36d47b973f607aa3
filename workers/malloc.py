"""The settings of glibc's malloc: what a worker keeps for its next step, and in how many arenas.

An edge returns to the system what it has freed.
"""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

KEPT_BYTES = 1 << 30

MAPPED_BYTES = 128 << 10
"""The least block that leaves the process when it is freed, while a model loads."""

ARENAS_MAX = 2

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Raise the thresholds of malloc in this process; return False where there is no glibc.

    Otherwise tensors of more than 32 MiB are mapped in each step, smaller ones until malloc has raised its
    thresholds by itself, and their pages fault in again.
    """
    return all(_set(name, KEPT_BYTES) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


@contextmanager
def large_blocks_returned() -> Generator[None]:
    """Return large blocks to the system as soon as they are freed, in the body; then `keep_freed_memory`.

    malloc would keep them wherever something behind them is in use.
    """
    _set(_M_MMAP_THRESHOLD, MAPPED_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()


def share_arenas() -> bool:
    """Let the threads of this process share a few arenas; return False where there is no glibc.

    Each thread would otherwise keep what it has freed in an arena of its own.
    To be called before threads start.
    """
    return _set(_M_ARENA_MAX, ARENAS_MAX)


def return_freed_memory() -> bool:
    """Return freed memory to the system; return False where there is no glibc, or nothing was free.

    malloc keeps it otherwise wherever something behind it is in use. It takes some milliseconds, in which
    other threads run but for those that need memory.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and bool(malloc_trim(0))


def _set(name: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(name, value))
