"""The gRPC server of a router, for edges, workers and operators."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
import grpc.aio

from tidemill.cluster.messages import (
    FleetStatus,
    MemberOrder,
    MembersAnswer,
    Misses,
    PlacementRequest,
    RoleScale,
    Route,
    SetBudget,
)
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.quotas.rates import Rates
from tidemill.cluster.quotas.router_quotas import QuotaRequest, Quotas
from tidemill.cluster.router.catalogue_server import CatalogueServer
from tidemill.cluster.rpc.channels import ROUTER_STREAMS_MAX, bind, new_server, server_credentials
from tidemill.cluster.rpc.codec import (
    BudgetCommand,
    DrainCommand,
    EdgeReport,
    LossReport,
    Malformed,
    MembersReply,
    RateCount,
    RoleCommand,
    ScaleAnswer,
    ScaleCommand,
    decode,
    decode_heartbeat,
    encode,
)
from tidemill.cluster.rpc.guard import Guard
from tidemill.cluster.rpc.placement_codec import (
    decode_placement_request,
    decode_placement_requests,
    encode_placement,
    encode_placements,
)
from tidemill.workers.messages import (
    Ack,
    Heartbeat,
    Overloaded,
    Poisonous,
    RequestError,
    Role,
    Unserved,
    WorkerId,
)

if TYPE_CHECKING:  # generic in the type stubs alone
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]

OrderT = TypeVar("OrderT", BudgetCommand, DrainCommand, RoleCommand)

NOT_FOR_EDGES = frozenset(("Report", "Memory", "Publish", "PutPart", "Members"))
"""The methods for workers, the server and its operators: an edge that joined by a token may not call them."""

TICK_S = 0.25

log = logging.getLogger(__name__)


class ServedRouter(Protocol):
    """The router behind the server."""

    async def place(self, request: PlacementRequest) -> Route: ...
    def place_now(self, request: PlacementRequest) -> Route | None: ...
    def heartbeat(self, heartbeat: Heartbeat) -> Ack: ...
    def budget_for(self, heartbeat: Heartbeat) -> int | None: ...
    def budgets(self) -> Mapping[str, SetBudget]: ...
    def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None: ...
    def silent_workers(self, workers: Iterable[WorkerId]) -> frozenset[WorkerId]: ...
    def tick(self) -> None: ...
    def status(self) -> FleetStatus: ...
    def set_budget(self, name: str, budget_bytes: int | None) -> None: ...
    def drain(self, name: str, *, drain: bool, force: bool) -> None: ...
    def set_role(self, name: str, role: Role) -> None: ...


class FleetSupervisor(Protocol):
    """The part of the supervisor that edges reach through a router. All of it raises Unserved."""

    async def scale(self, counts: Mapping[Role, int], *, pending: bool) -> str | None: ...
    async def roles(self) -> tuple[RoleScale, ...]: ...
    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int) -> int: ...
    async def reset(self, edge: str) -> int: ...
    async def members(self, order: MemberOrder) -> MembersAnswer: ...


class RouterService:
    """Serves a router. A worker whose stream of heartbeats breaks is lost immediately, a silent one at the
    next tick of the router."""

    def __init__(
        self,
        router: ServedRouter,
        tls: MutualTls | None = None,
        supervisor: FleetSupervisor | None = None,
    ) -> None:
        """Refuse what the supervisor alone can do if there is none."""
        self._router = router
        self._tls = tls
        self._guard = None if tls is None else Guard(NOT_FOR_EDGES)
        self._rates, self._quotas = Rates(), Quotas()
        self._fence = 0
        self._streams: dict[WorkerId, object] = {}  # the latest stream of each worker
        self._server = new_server(ROUTER_STREAMS_MAX)
        handlers: dict[str, Handler] = {
            "Place": grpc.unary_unary_rpc_method_handler(self._place),
            "PlaceAll": grpc.unary_unary_rpc_method_handler(self._place_all),
            "Report": grpc.stream_stream_rpc_method_handler(self._report),
            "Memory": grpc.stream_stream_rpc_method_handler(self._memory),
            "Budgets": grpc.unary_unary_rpc_method_handler(self._budgets),
            "Lost": grpc.unary_unary_rpc_method_handler(self._lost),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "Out": grpc.unary_unary_rpc_method_handler(self._out),
            "Count": grpc.unary_unary_rpc_method_handler(self._count),
            "Quota": grpc.unary_unary_rpc_method_handler(self._quota),
            "SetBudget": self._order(
                BudgetCommand, lambda order: router.set_budget(order.name, order.budget_bytes)
            ),
            "Drain": self._order(
                DrainCommand, lambda order: router.drain(order.name, drain=order.drain, force=order.force)
            ),
            "SetRole": self._order(RoleCommand, lambda order: router.set_role(order.name, order.role)),
            **CatalogueServer().handlers(),
            **({} if supervisor is None else _supervised(supervisor)),
        }
        if self._guard is not None:
            handlers = {name: self._guard.guarded(name, method) for name, method in handlers.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tidemill.Router", handlers),)
        )

    def fence(self, number: int) -> None:
        """Refuse orders of supervisors with a lower number: they were replaced."""
        self._fence = max(self._fence, number)

    def revoke(self, serials: Collection[str]) -> None:
        """Refuse the certificates of these serials, too, and end their streams; workers do so with their next
        heartbeats."""
        if self._guard is not None:
            self._guard.revoke(serials)

    async def start(self, host: str, port: int = 0) -> str:
        """Listen, and return the address as host:port. Raises OSError."""
        address = bind(self._server, host, port, server_credentials(self._tls))
        await self._server.start()
        return address

    async def run(self) -> None:
        """Drop silent workers, until cancelled."""
        while True:
            self._router.tick()
            await asyncio.sleep(TICK_S)

    async def stop(self) -> None:
        await self._server.stop(grace=None)

    async def _place(self, data: bytes, context: "Context") -> bytes:
        try:
            return encode_placement(await self._router.place(decode_placement_request(data)))
        except (Overloaded, Poisonous) as error:
            return encode_placement(error)
        except Unserved as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _place_all(self, data: bytes, context: "Context") -> bytes:
        try:
            return encode_placements(map(self.place_now, decode_placement_requests(data)))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def place_now(self, request: PlacementRequest) -> Route | Overloaded | Poisonous | Unserved:
        """Return the route of a request in a frame, or why it has none. A frame waits for no worker."""
        try:
            return self._router.place_now(request) or Unserved("no worker can decode now")
        except (Overloaded, Poisonous) as error:
            return error

    async def _report(self, frames: AsyncIterator[bytes], context: "Context") -> None:
        stream = object()
        worker: WorkerId | None = None
        try:
            async for data in frames:
                heartbeat = decode_heartbeat(data)
                if worker is None:
                    worker = heartbeat.info.worker
                    self._streams[worker] = stream
                elif heartbeat.info.worker != worker:
                    raise Malformed(f"{worker} reports for {heartbeat.info.worker}")
                ack = self._router.heartbeat(heartbeat)
                if self._guard is not None and self._guard.revoked:
                    ack = replace(ack, revoked=self._guard.revoked)
                await context.write(encode(ack))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if worker is not None and self._streams.get(worker) is stream:
                del self._streams[worker]
                self._router.report_lost(worker)

    async def _memory(self, frames: AsyncIterator[bytes], context: "Context") -> None:
        """Send a worker of another fleet its budget, which it keeps for a while when silent."""
        try:
            async for data in frames:
                budget_bytes = self._router.budget_for(decode_heartbeat(data))
                await context.write(encode(Ack(budget_bytes=budget_bytes)))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _budgets(self, _: bytes, context: "Context") -> bytes:  # noqa: ARG002 - gRPC passes both
        return encode(self._router.budgets())

    async def _lost(self, data: bytes, context: "Context") -> bytes:
        try:
            loss = decode(LossReport, data)
            self._router.report_lost(loss.worker, loss.content)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""

    async def _status(self, _: bytes, context: "Context") -> bytes:  # noqa: ARG002 - gRPC passes both
        return encode(self._router.status())

    async def _out(self, data: bytes, context: "Context") -> bytes:
        try:
            return encode(self._router.silent_workers(decode(frozenset[WorkerId], data)))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _count(self, data: bytes, context: "Context") -> bytes:
        try:
            asked = decode(RateCount, data)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        now_s = asyncio.get_running_loop().time()
        return encode(self._rates.count(asked.name, max(1, asked.per_minute), now_s, asked.ahead_s))

    async def _quota(self, data: bytes, context: "Context") -> bytes:
        try:
            asked = decode(QuotaRequest, data)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return encode(self._quotas.ask(asked, asyncio.get_running_loop().time()))

    def _order(self, kind: type[OrderT], carry_out: Callable[[OrderT], None]) -> "Handler":
        """Return the gRPC method for a command of an operator, which the router may refuse."""

        async def call(data: bytes, context: "Context") -> bytes:
            try:
                order = decode(kind, data)
                if order.fence and order.fence < self._fence:
                    refusal = f"the supervisor {order.fence} was replaced by {self._fence}"
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
                self.fence(order.fence)
                carry_out(order)
            except RequestError as error:
                await context.abort(_CODES.get(error.status, grpc.StatusCode.OUT_OF_RANGE), str(error))
            except Malformed as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return b""

        return grpc.unary_unary_rpc_method_handler(call)


def _supervised(supervisor: FleetSupervisor) -> "dict[str, Handler]":
    """Return the gRPC methods that the supervisor answers."""

    async def scale(order: ScaleCommand) -> ScaleAnswer:
        try:
            return ScaleAnswer(lacks=await supervisor.scale(order.counts, pending=order.pending))
        except RequestError as error:
            return ScaleAnswer(refusal=(str(error), error.param, error.status, error.code))

    async def report(sent: EdgeReport) -> int:
        return await supervisor.report(sent.edge, sent.misses, sent.resets, sent.open_requests)

    async def members(order: MemberOrder) -> MembersReply:
        try:
            return MembersReply(answer=await supervisor.members(order))
        except RequestError as error:
            return MembersReply(refusal=(str(error), error.param, error.status, error.code))

    def method(kind: Any, carry_out: Callable[[Any], Awaitable[object]]) -> "Handler":  # noqa: ANN401
        async def call(data: bytes, context: "Context") -> bytes:
            try:
                return encode(await carry_out(decode(kind, data) if data else None))
            except Unserved as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except Malformed as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return grpc.unary_unary_rpc_method_handler(call)

    return {
        "Scale": method(ScaleCommand, scale),
        "Roles": method(None, lambda _: supervisor.roles()),
        "Missed": method(EdgeReport, report),
        "Reset": method(str, supervisor.reset),
        "Members": method(MemberOrder, members),
    }


_CODES = {404: grpc.StatusCode.NOT_FOUND, 409: grpc.StatusCode.FAILED_PRECONDITION}
