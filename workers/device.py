"""The device that an engine computes on: whether it is there, and the memory of its arena."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from tidemill.kernels.shared.interpreter import interprets
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.backing import Backing, BackingUnavailable, Fixed, Kvcached, Mmap
from tidemill.workers.settings import EngineSettings, SettingsError

HOST = torch.device("cpu")


def device_of(settings: EngineSettings) -> torch.device:
    """With its index. Raises SettingsError when it is not there, or its operators do not run on it."""
    requested = torch.device(settings.device)
    if requested.type == "cpu":
        if settings.variant == "triton" and not interprets():
            raise SettingsError("--kernels triton computes in CUDA memory: use cpu, or add --device cuda")
        return requested
    if not torch.cuda.is_available():
        raise SettingsError(
            f"--device {settings.device}: torch sees no CUDA device here: use --device cpu, or install a CUDA"
            " build of torch and the driver"
        )
    device, count = torch.device("cuda", requested.index or 0), torch.cuda.device_count()
    if device.index >= count:
        raise SettingsError(f"--device {settings.device}: the last one here is cuda:{count - 1}")
    return device


def memory_name(device: torch.device) -> str:
    """Of the memory that it computes in: workers of one node that say the same share it. A number would not
    do: a process may see some of the devices alone."""
    if device.type == "cpu":
        return "cpu"
    found: Any = torch.cuda  # it leaves the type of properties open
    return f"cuda-{found.get_device_properties(device).uuid}"


def open_backing(settings: EngineSettings, num_bytes: int) -> Backing:
    """What one rank reserves. Raises OutOfMemory and SettingsError."""
    if not settings.on_cuda:
        return Mmap(num_bytes) if settings.backing_kind == "mmap" else Fixed(num_bytes)
    device = device_of(settings)
    with granted(device, f"an arena of {num_bytes:,} bytes: lower --memory, or stop what else uses it"):
        if settings.backing_kind == "fixed":
            return Fixed(num_bytes, str(device))
        try:
            return Kvcached(num_bytes, str(device))
        except BackingUnavailable as error:
            raise SettingsError(f"{error}; or take it all at once with --backing fixed") from error


@contextmanager
def granted(device: torch.device, what: str) -> Generator[None]:
    """Raises OutOfMemory where torch is not granted memory of the device; `what` it is for, and the fix."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{device} has no memory left for {what}") from error


def settle(device: torch.device) -> None:
    """What was started on the device has ended, for every thread; what torch holds in vain is given back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
