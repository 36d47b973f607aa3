"""Tell errors that end the use of a device in this process from those of one step. Pure."""

import re

import torch

_OF_A_DEVICE = re.compile(r"CUDA error|Triton Error \[CUDA\]")
_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


def is_sticky(error: Exception) -> bool:
    """Return whether every later call to the device in this process fails as well, so that no request caused
    it: an error of CUDA other than one of memory. The types and texts are those of torch and Triton."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    is_of_device = isinstance(error, torch.AcceleratorError) or _OF_A_DEVICE.match(str(error))
    return bool(is_of_device) and not _OF_MEMORY.search(str(error))
