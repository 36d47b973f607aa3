"""The router as a Ray actor.

A crashed router is back as soon as this module is imported, so nothing here imports torch. Its
restarts have no backoff: no request is placed without it, and starting a process already takes a
second of one core.
"""

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from tidemill.cluster.observability.logs import start_logs
from tidemill.cluster.processes.joining.exchange import JoinServer
from tidemill.cluster.processes.restart_backoff import Backoff
from tidemill.cluster.processes.scaling.journal import Journal
from tidemill.cluster.processes.supervisor_client import RAY, RayStore, SupervisorClient, exit_on_error
from tidemill.cluster.router.compiled import CompiledPlacement, load
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.settings import RouterSettings
from tidemill.kernels.shared.compiler import KernelUnavailable

if TYPE_CHECKING:
    from tidemill.cluster.router.router import Router

log = logging.getLogger(__name__)


class RouterActor:
    """The process of the router. After a restart the workers' next heartbeats restore its state."""

    def __init__(self, settings: RouterSettings, name: str | None = None) -> None:
        """Start the replica of this name, the first without one."""
        name = settings.name if name is None else name
        start_logs(settings.telemetry, router=name)
        loop = asyncio.get_running_loop()
        build = cast("type[Router]", resolve_name(settings.build))
        router = build(
            loop.time,
            broker=settings.broker,
            expected=settings.expected,
            ttft_s_max=settings.ttft_s_max,
            has_budgets=settings.memory_router is None,
            held_max=settings.held_max,
            compiled=_compiled(settings.cache_folder),
        )
        self._namespace: str = RAY.get_runtime_context().namespace
        supervisor = SupervisorClient(settings.name, self._namespace)
        self._backoff = backoff = Backoff(lasts_from_ready=True)
        self._service = RouterService(
            router, settings.tls, supervisor, lambda worker: backoff.ready(worker, loop.time())
        )
        host: str = settings.host or RAY.util.get_node_ip_address()
        self._join: JoinServer | None = None
        if settings.tls is not None and settings.join_port is not None and name == settings.name:
            self._join = JoinServer(supervisor.join, settings.tls)
        self._address = loop.create_task(self._open(settings, host, settings.port_of(name)))
        self._ticks = loop.create_task(self._service.run())
        for task in (self._address, self._ticks):
            task.add_done_callback(partial(exit_on_error, what="router"))

    async def address(self) -> str:
        return await self._address

    async def join_address(self) -> str:
        """Return the address at which edges join by tokens; empty: not here."""
        await self._address
        return "" if self._join is None else self._join.address

    async def revoke(self, serials: Collection[str]) -> None:
        self._service.revoke(serials)

    async def _open(self, settings: RouterSettings, host: str, port: int) -> str:
        """Listen when the revoked certificates and the fencing number of the journal are known."""
        journal = Journal(RayStore(), self._namespace)
        self._service.revoke((await asyncio.to_thread(journal.read)).members.revoked)
        self._service.fence(journal.number)
        if self._join is not None:
            await self._join.start(host, settings.join_port or 0)
        return await self._service.start(host, port)

    async def begin(self, name: str) -> float:
        """Record that an incarnation of this worker begins; return the seconds that it must wait first."""
        return self._backoff.begin(name, asyncio.get_running_loop().time())


def _compiled(cache_folder: Path | None) -> CompiledPlacement | None:
    """Return compiled placement. Without a compiler the definition makes the same choices, slower."""
    if cache_folder is None:
        return None
    try:
        return load(cache_folder)
    except KernelUnavailable as error:
        log.warning("placement is not compiled and takes about ten times as long: %s", error)
        return None
