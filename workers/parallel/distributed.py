"""Collectives over torch.distributed: NCCL for ranks with a GPU each, gloo for CPUs. Its only user.

A group is an object here, and not registered with torch: a process may have several, or lose one.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import psutil
import torch
from torch import distributed

from tidemill.workers.models.collectives import LEADER
from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.network import Network, Ports
from tidemill.workers.parallel.one_shot import OneShot
from tidemill.workers.parallel.shared_memory import added

Transport = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
STORE = "collectives"
SAME_INDEX = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Lets ranks have devices of the same number, as they have where each sees one device alone. torch reads it
from the environment alone. NCCL refuses two ranks of one device."""

FOREVER = timedelta(days=365)
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""The interface of NCCL, which it reads from the environment alone."""


class Distributed:
    """The ranks of a group. The constructor blocks until all have joined.

    store       the ranks find each other through it: see `folder_store` and `port_stores`
    wait_s_max  the time that a rank may delay the others, here and in each call; then GroupBroken is raised
    network     of this rank; None: all ranks are on this machine
    one_shot    sums small tensors in place of the transport
    """

    def __init__(
        self,
        store: distributed.Store,
        index: int,
        size: int,
        transport: Transport,
        wait_s_max: float,
        network: Network | None = None,
        one_shot: OneShot | None = None,
    ) -> None:
        self.index = index
        self.size = size
        self._transport = transport
        self._one_shot = one_shot
        timeout = timedelta(seconds=wait_s_max)
        store.set_timeout(timeout)
        self._group = _met(lambda: _group(store, index, size, transport, timeout, network))

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        return _side_by_side(self._of_all(x_TN), width)

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Add, over gloo in the order of the ranks, from 0: its own order depends on the place in the
        tensor."""
        if self._one_shot is not None and self._one_shot.takes(x_TN):
            return self._one_shot.reduce(x_TN)
        if self._transport == "gloo":
            return added(self._of_all(x_TN))
        x_TN = x_TN.contiguous()
        options = distributed.AllreduceOptions()
        options.asyncOp = False  # on the stream of the step, so nothing waits: NCCL's own takes two events
        _met(lambda: self._group.allreduce([x_TN], options))
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

    def meet(self) -> None:
        """Wait until every rank has called this, without a limit. Raises GroupBroken when one has ended."""
        options = distributed.AllreduceOptions()
        options.timeout = FOREVER
        _met(lambda: self._group.allreduce([torch.zeros(1)], options).wait())

    def close(self) -> None:
        """End what the other ranks wait for."""
        self._group.shutdown()

    def _of_all(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, `[R, T, N]`."""
        tokens, columns = x_TN.shape
        all_RTN = x_TN.new_empty(self.size * tokens, columns)
        # The public call accepts only registered groups.
        _met(lambda: self._group._allgather_base(all_RTN, x_TN.contiguous()).wait())  # noqa: SLF001
        return all_RTN.view(self.size, tokens, columns)


def folder_store(folder: Path, size: int) -> distributed.Store:
    """Return the store of ranks on one machine: a file in a folder that is new and accessible to this user
    only."""
    return distributed.FileStore(str(folder / STORE), size)


def part_of(store: distributed.Store, name: str) -> distributed.Store:
    """Return a store for another exchange of the same ranks, whose keys do not meet those of `store`."""
    return distributed.PrefixStore(name, store)


def named_group(name: str, store: distributed.Store, index: int, size: int) -> distributed.ProcessGroup:
    """Return a group in which torch's symmetric memory finds the other ranks by name, while it is referenced.
    It replaces that of an earlier engine of this process."""
    os.environ[SAME_INDEX] = "1"
    registry: Any = resolve_name("torch._C._distributed_c10d")  # there are no public names
    registry._unregister_process_group(name)  # noqa: SLF001
    group = distributed.ProcessGroup(store, index, size)
    registry._register_process_group(name, group)  # noqa: SLF001
    return group


def port_stores(
    ports: Ports, listener: socket.socket | None, wait_s_max: float
) -> tuple[distributed.Store, distributed.Store]:
    """Return stores for two groups of the same ranks on several nodes. The leader passes the socket that
    listens at `ports.store`, because torch's own would listen on every interface. Raises GroupBroken."""
    leads: dict[str, Any] = {}
    if listener is not None:
        leads = {"is_master": True, "master_listen_fd": listener.detach()}
    timeout = timedelta(seconds=wait_s_max)
    store = _met(
        lambda: distributed.TCPStore(
            ports.host, ports.store, timeout=timeout, wait_for_workers=False, **leads
        )
    )
    return part_of(store, "0"), part_of(store, "1")


def _group(
    store: distributed.Store,
    index: int,
    size: int,
    transport: Transport,
    timeout: timedelta,
    network: Network | None,
) -> Any:  # noqa: ANN401  one of two classes of torch
    match transport:
        case "nccl":
            if network is not None:
                _name_interface(network)
            kind: Any = distributed.ProcessGroupNCCL
            options = kind.Options()
        case "gloo":
            host = LOOPBACK if network is None else network.host
            named = None if network is None else network.interface
            kind = distributed.ProcessGroupGloo
            options = kind._Options()  # noqa: SLF001  # pyrefly: ignore[missing-attribute]  there is no public name
            devices = {"interface": named} if named else {"hostname": host}
            options._devices = [kind.create_device(**devices)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return kind(store, index, size, options)


def _name_interface(network: Network) -> None:
    """Tell NCCL the interface, unless the environment does and the configuration does not."""
    if network.interface is not None:
        os.environ[NCCL_INTERFACE] = f"={network.interface}"
    elif (found := interface_of(network.host)) is not None:
        os.environ.setdefault(NCCL_INTERFACE, f"={found}")


def interface_of(host: str) -> str | None:
    """Return the name of this node's interface with the address `host`, None without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


def _met(call: Callable[[], Any]) -> Any:  # noqa: ANN401  what the call returns
    try:
        return call()
    except RuntimeError as error:  # torch raises nothing more specific for a peer that is gone or late
        raise GroupBroken(f"the ranks have lost each other ({str(error).splitlines()[0]})") from error


def _side_by_side(all_RTN: torch.Tensor, width: int) -> torch.Tensor:
    return all_RTN.transpose(0, 1).reshape(all_RTN.shape[1], -1)[:, :width].contiguous()
