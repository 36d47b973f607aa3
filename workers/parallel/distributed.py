# pyright: basic, reportPrivateImportUsage=false
# torch's process groups have types with other names than the groups.
"""Collectives over torch.distributed: NCCL for ranks with a GPU each, gloo for CPUs. Its only user.

A group is an object here, and not registered with torch: a process may have several, or lose one.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed

from tidemill.workers.models.collectives import LEADER
from tidemill.workers.parallel.errors import GroupBroken

Transport = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
STORE = "collectives"


class Distributed:
    """The ranks of one machine. The constructor blocks until all have joined.

    folder      one for the group, new, accessible to this user only: the ranks find each other through a
    file in
                it, because torch's TCP store would listen on every interface
    wait_s_max  the time that a rank may delay the others, here and in each call; then GroupBroken is raised
    """

    def __init__(self, folder: Path, index: int, size: int, transport: Transport, wait_s_max: float) -> None:
        self.index = index
        self.size = size
        self._group = _met(lambda: _group(folder, index, size, transport, timedelta(seconds=wait_s_max)))

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        tokens, columns = x_TN.shape
        all_RTN = x_TN.new_empty(self.size * tokens, columns)
        # The public call accepts only registered groups.
        _met(lambda: self._group._allgather_base(all_RTN, x_TN.contiguous()).wait())  # noqa: SLF001
        return _side_by_side(all_RTN.view(self.size, tokens, columns), width)

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        x_TN = x_TN.contiguous()
        _met(lambda: self._group.allreduce([x_TN], distributed.AllreduceOptions()).wait())
        return x_TN

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        options = distributed.GatherOptions()
        options.rootRank = LEADER
        all_RTN = x_TN.new_empty(self.size if self.index == LEADER else 0, *x_TN.shape)
        parts = [list(all_RTN.unbind())] if self.index == LEADER else []
        _met(lambda: self._group.gather(parts, [x_TN.contiguous()], options).wait())
        return _side_by_side(all_RTN, width) if self.index == LEADER else x_TN[:, :0]

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        _met(lambda: self._group.broadcast(x, LEADER).wait())

    def close(self) -> None:
        """End what the other ranks wait for."""
        self._group.shutdown()


def _group(folder: Path, index: int, size: int, transport: Transport, timeout: timedelta) -> Any:  # noqa: ANN401  one of two classes of torch
    store = distributed.FileStore(str(folder / STORE), size)
    store.set_timeout(timeout)
    match transport:
        case "nccl":
            kind: Any = distributed.ProcessGroupNCCL
            options = kind.Options()
        case "gloo":
            kind = distributed.ProcessGroupGloo
            options = kind._Options()  # noqa: SLF001  there is no public name
            options._devices = [kind.create_device(hostname=LOOPBACK)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return kind(store, index, size, options)


def _met(call: Callable[[], Any]) -> Any:  # noqa: ANN401  what the call returns
    try:
        return call()
    except RuntimeError as error:  # torch raises nothing more specific for a peer that is gone or late
        raise GroupBroken(f"the ranks have lost each other ({str(error).splitlines()[0]})") from error


def _side_by_side(all_RTN: torch.Tensor, width: int) -> torch.Tensor:
    return all_RTN.transpose(0, 1).reshape(all_RTN.shape[1], -1)[:, :width].contiguous()
