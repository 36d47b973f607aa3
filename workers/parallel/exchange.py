"""The exchanges of one rank with the others: of what the leader decides, and inside the model."""

import socket
from dataclasses import replace
from typing import NamedTuple

import torch

from tidemill.workers.parallel.distributed import Distributed, folder_store, named_group, part_of, port_stores
from tidemill.workers.parallel.network import Meeting, Network, Ports
from tidemill.workers.parallel.one_shot import NAME, OneShot
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

    control: SharedMemory | Distributed
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


def open_exchange(
    settings: EngineSettings,
    meeting: Meeting,
    index: int,
    device: torch.device,
    network: Network | None = None,
    listener: socket.socket | None = None,
) -> Exchange:
    """Meet the other ranks; block until all have come. Over several nodes `network` is that of this rank, and
    the leader passes the socket at `meeting.store`. Raises GroupBroken."""
    size, backend = settings.tensor_parallel_size, settings.backend
    network = network and replace(network, interface=settings.tensor_parallel_interface)
    wait_s_max = WARM_UP_S_MAX if device.type == "cuda" else WAIT_S_MAX
    if isinstance(meeting, Ports):
        own, store = port_stores(meeting, listener, WAIT_S_MAX)
        control = Distributed(own, index, size, "gloo", WAIT_S_MAX, network)
        if device.type == "cpu":
            return Exchange(control, control)
    else:
        control = SharedMemory(meeting, index, size, WAIT_S_MAX)
        if backend == "shared-memory":
            return Exchange(control, control)
        store = folder_store(meeting, size)
    try:
        assert backend != "shared-memory", "see EngineSettings"
        one_shot = None
        if settings.one_shot_bytes:
            found = part_of(store, "one-shot")
            group = named_group(NAME, found, index, size)
            one_shot = OneShot(found, group, device, settings.one_shot_bytes)
        model = Distributed(store, index, size, backend, wait_s_max, network, one_shot)
        model.reduce(torch.zeros(1, 1, device=device))  # NCCL connects now, while the folder is there
    except BaseException:
        control.close()
        raise
    return Exchange(control, model)
