"""The exchanges of one rank with the others: of what the leader decides, and inside the model."""

from pathlib import Path
from typing import NamedTuple

import torch

from tidemill.workers.parallel.distributed import Distributed
from tidemill.workers.parallel.shared_memory import SharedMemory
from tidemill.workers.settings import EngineSettings

WAIT_S_MAX = 60.0
"""The time in seconds that one rank may delay the others inside a step, or while a group forms."""

WARM_UP_S_MAX = 600.0
"""The same between devices: ranks wait there while others compile kernels. The end of a rank ends its link to
the leader at the same moment, and the leader ends the group."""


class Exchange(NamedTuple):
    """Both have the same rank and size.

    control  integers in host memory, whatever the device: tokens, draws, sizes of memory
    model    the exchange inside a forward pass, of tensors on the device
    """

    control: SharedMemory
    model: SharedMemory | Distributed

    def least(self, value: int) -> int:
        """Return the least `value` of all ranks. Wait for them without a limit: a rank may read weights much
        longer than another. Raises GroupBroken when one ends meanwhile."""
        self.control.meet()
        return int(self.control.gather(torch.tensor([[value]]), self.control.size).min())

    def close(self) -> None:
        """End what the other ranks wait for."""
        self.control.close()
        if self.model is not self.control:
            self.model.close()


def open_exchange(settings: EngineSettings, folder: Path, index: int, device: torch.device) -> Exchange:
    """Meet the other ranks in `folder`; block until all have come. Raises GroupBroken."""
    size, backend = settings.tensor_parallel_size, settings.backend
    control = SharedMemory(folder, index, size, WAIT_S_MAX)
    if backend == "shared-memory":
        return Exchange(control, control)
    try:
        model = Distributed(
            folder, index, size, backend, WARM_UP_S_MAX if device.type == "cuda" else WAIT_S_MAX
        )
        model.reduce(torch.zeros(1, 1, device=device))  # NCCL connects now, while the folder is there
    except BaseException:
        control.close()
        raise
    return Exchange(control, model)
