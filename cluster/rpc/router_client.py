"""The client of a fleet's routers: placements, the state of the fleet, and orders of operators."""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, get_args

from tidemill.cluster.messages import BudgetTarget, FleetStatus, Misses, PlacementRequest, Route
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.orders import Answer, AnswerT, Order, RouterOrder, answer_type
from tidemill.cluster.rpc.codec import EdgeReport, LossReport, Malformed, decode, encode
from tidemill.cluster.rpc.placements import Placements
from tidemill.cluster.rpc.router_failover import ORDERS, OUT_WAIT_S_MAX, FindRouter, RouterLinks
from tidemill.workers.messages import Unserved, WorkerId

STATUS_WAIT_S_MAX = 5.0
ORDER_WAIT_S_MAX = 5.0
BUDGETS_WAIT_S_MAX = 0.5
LOST_WAIT_S_MAX = 1.0
SUPERVISOR_WAIT_S_MAX = 10.0
"""Longer than a router waits for the supervisor."""


class RouterClient:
    """The `RequestRouter` of cluster/edge/flow.py, over gRPC. It belongs to one asyncio loop. Each router may
    restart under another address at any time."""

    def __init__(
        self,
        *routers: FindRouter,
        tls: MutualTls | None = None,
        fence: Callable[[], int] = lambda: 0,
    ) -> None:
        """`fence` returns the number of the supervisor that uses this client; 0: not a supervisor."""
        self._fence = fence
        self._links = RouterLinks(routers, tls)
        self._placements = Placements(self._links)

    async def place(self, request: PlacementRequest) -> Route:
        return await self._placements.place(request)

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        """Report to the router that a worker is gone, and the content that crashed it, if known. The router
        notices it by itself when the report does not arrive."""
        with suppress(Unserved):
            await self._links.call("Lost", lambda: encode(LossReport(worker, blamed)), LOST_WAIT_S_MAX)

    async def silent_workers(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Return which of these workers have sent the router no heartbeat for too long; none if it does not
        answer."""
        with suppress(Unserved, Malformed):
            body = encode(list(workers))
            return decode(frozenset[WorkerId], await self._links.call("Out", lambda: body, OUT_WAIT_S_MAX))
        return frozenset()

    async def status(self) -> FleetStatus:
        """Return the status of the fleet. Raises Unserved when no router answers."""
        data = await self._links.call("Status", lambda: b"", STATUS_WAIT_S_MAX, first=True)
        return decode(FleetStatus, data)

    async def budgets(self) -> dict[str, BudgetTarget]:
        """Return the budget that the first router has set, by the worker's name; empty if it does not
        answer."""
        with suppress(Unserved, Malformed):
            data = await self._links.call("Budgets", lambda: b"", BUDGETS_WAIT_S_MAX, first=True)
            return decode(dict[str, BudgetTarget], data)
        return {}

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int = 0) -> int:
        """Report what the edge of this id has answered and refused since its last report, the number of
        resets of the prefix cache that it knows, and its open requests. Return the present number of resets.
        Raises Unserved."""
        report = encode(EdgeReport(edge, misses, resets, open_requests))
        return decode(int, await self._links.call("Missed", lambda: report, SUPERVISOR_WAIT_S_MAX))

    async def carry_out(self, order: Order[AnswerT]) -> AnswerT:
        """Have an order carried out: by the first router, or by the supervisor through any. Raises
        RequestError, Unserved."""
        kind, by_router = type(order), isinstance(order, get_args(RouterOrder))
        wait_s_max = ORDER_WAIT_S_MAX if by_router else SUPERVISOR_WAIT_S_MAX
        data = await self._links.call(
            kind.__name__,
            lambda: encode((self._fence(), order)),
            wait_s_max,
            first=by_router,
            service=ORDERS,
        )
        reply: Any = decode(Answer[answer_type(kind)], data)  # pyrefly: ignore[invalid-annotation]
        if reply.refused is not None:
            raise reply.refused.error()
        return reply.answer

    async def close(self) -> None:
        self._placements.close()
        await self._links.close()
