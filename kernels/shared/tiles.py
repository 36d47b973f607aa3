"""The two classes of devices for which the tiles of kernels are chosen."""

from functools import cache
from typing import Any

import torch

LARGE_BYTES = 227 << 10
"""The shared memory of a program on sm_90 and sm_100, whose matrix units read their factors there. On sm_80
(163 KiB), sm_89 and sm_120 (99 KiB) factors come from registers."""


@cache
def shared_bytes() -> int:
    """Return the shared memory that a program has on this process's device; without one that of sm_90."""
    if not torch.cuda.is_available():
        return LARGE_BYTES
    found: Any = torch.cuda  # it leaves the type of properties open
    return found.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def has_large() -> bool:
    return shared_bytes() >= LARGE_BYTES
