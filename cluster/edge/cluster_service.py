"""The service behind the HTTP edge: the flow over a router and the workers of one model."""

import asyncio
from contextlib import suppress
from dataclasses import replace

from opentelemetry.trace import Tracer

from tidemill.cluster.edge.failure_detector import watch
from tidemill.cluster.edge.flow import WAIT_S_MAX, serve
from tidemill.cluster.edge.service import ReportingEdge, ServedModel
from tidemill.cluster.edge.tracing import TracedPeers, TracedRouter
from tidemill.cluster.messages import FleetStatus, Misses
from tidemill.cluster.orders import AnswerT, Order, Reset, SetBudget
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.periodic import every
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import EngineInfo, Request, StreamPiece, Unserved

REPORT_S = 1.0
"""The period of an edge's reports to the supervisor."""


class ClusterService:
    """A service of one model. `info` comes from any ready worker, because all workers of one model agree
    on what names keys. `memory` is the router that assigns the budgets of these workers, if `router` does
    not."""

    def __init__(
        self,
        model: ServedModel,
        router: RouterClient,
        peers: WorkerClients,
        info: EngineInfo,
        *,
        edge: ReportingEdge,
        memory: RouterClient | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.model = model
        self._edge = edge
        self._tracer = tracer
        self._router = router
        self._memory = memory
        self._peers = peers
        self.info = info
        self.resets = 0  # of the prefix cache
        self._reported = Misses()

    async def stream(self, request: Request, emit: Emit[StreamPiece]) -> None:
        wait_s_max = self.model.cold_start_s_max or WAIT_S_MAX
        if self.resets:
            request = replace(request, salt=f"{request.salt}/{self.resets}")
        if self._tracer is None or not request.trace_parent:
            router, peers = self._router, self._peers
        else:
            router = TracedRouter(self._router, self._tracer, request.trace_parent)
            peers = TracedPeers(self._peers, self._tracer, self.info.page_tokens)
        await serve(request, router, peers, self._root_of, self.info, emit, wait_s_max)

    async def status(self) -> FleetStatus:
        if self._memory is None:
            return await self._router.status()
        status, budgets = await asyncio.gather(self._router.status(), self._memory.budgets())
        return status.with_budgets(budgets)

    async def release(self, tenant: str, session: str) -> None:
        for worker in (await self._router.status()).workers:
            self._peers.release(worker.info.worker, worker.info.address, tenant, session)

    async def reset_prefix_cache(self) -> None:
        """Change all names; entries under the old names are evicted like anything unused."""
        self.resets = max(self.resets, await self._router.carry_out(Reset(self._edge.id)))

    async def carry_out(self, order: Order[AnswerT]) -> AnswerT:
        router = self._router
        if self._memory is not None and issubclass(type(order), SetBudget):
            router = self._memory
        return await router.carry_out(order)

    async def run(self) -> None:
        """Give up workers that are lost, and report to the supervisor, until cancelled."""
        async with asyncio.TaskGroup() as both:
            both.create_task(watch(self._peers, self._router))
            both.create_task(every(REPORT_S, self._report, "reports"))

    async def _report(self) -> None:
        """Report what this edge has answered and refused, and learn of resets."""
        known = -1
        while self.resets != known:  # the supervisor waits for a report that knows them
            misses, known = self._edge.counts.misses(self.model.name), self.resets
            num_open = 0
            if self.model.cold_start_s_max is not None:
                num_open = self._edge.counts.open_requests(self.model.name)
            with suppress(Unserved):  # the next report has it, too
                resets = await self._router.report(self._edge.id, misses - self._reported, known, num_open)
                self.resets = max(self.resets, resets)  # one may have been ordered here meanwhile
                self._reported = misses

    async def close(self) -> None:
        await self._peers.close()
        await self._router.close()
        if self._memory is not None:
            await self._memory.close()

    def _root_of(self, salt: str) -> PageKey:
        return Namespace(model=self.info.fingerprint, layout=self.info.layout, salt=salt).root()
