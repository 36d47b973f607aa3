"""Let glibc keep memory that a step frees, for the next step."""

import ctypes

KEPT_BYTES = 1 << 30

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Raise the thresholds of malloc in this process; return False where there is no glibc.

    Otherwise tensors of more than 32 MiB are mapped in each step, smaller ones until malloc has raised its
    thresholds by itself, and their pages fault in again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, KEPT_BYTES) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
