"""The gRPC server of a router, for edges, workers and operators."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, get_args

import grpc
import grpc.aio

from tidemill.cluster.messages import Misses, PlacementRequest, Route
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.orders import Answer, EdgeOrder, Order, Refused, RouterOrder, SupervisorOrder
from tidemill.cluster.quotas.rates import Rates
from tidemill.cluster.quotas.router_quotas import QuotaRequest, Quotas
from tidemill.cluster.router.catalogue_server import CatalogueServer
from tidemill.cluster.router.router import Router
from tidemill.cluster.rpc.channels import ROUTER_STREAMS_MAX, bind, new_server, server_credentials
from tidemill.cluster.rpc.codec import (
    EdgeReport,
    LossReport,
    Malformed,
    RateCount,
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
from tidemill.kvstore.periodic import FAILED_ROUNDS, every
from tidemill.workers.messages import (
    Ack,
    Overloaded,
    Poisonous,
    RequestError,
    Unserved,
    WorkerId,
)

if TYPE_CHECKING:  # generic in the type stubs alone
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]

Call = Callable[[bytes], Awaitable[bytes]]

NOT_FOR_EDGES = frozenset(
    ("Report", "Memory", "Publish", "PutPart", *(kind.__name__ for kind in get_args(EdgeOrder)))
)
"""The methods for workers, the server and its operators: an edge that joined by a token may not call them."""

TICK_S = 0.25


class FleetSupervisor(Protocol):
    """The part of the supervisor that edges reach through a router. All of it raises Unserved."""

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int) -> int: ...
    async def failed_rounds(self) -> int: ...
    async def carry_out(self, order: SupervisorOrder) -> object: ...


class RouterService:
    """Serves a router. A worker whose stream of heartbeats breaks is lost immediately, a silent one at the
    next tick of the router."""

    def __init__(
        self,
        router: Router,
        tls: MutualTls | None = None,
        supervisor: FleetSupervisor | None = None,
        on_ready: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Refuse what the supervisor alone can do if there is none. Call `on_ready` with the name of each
        worker that begins to report."""
        self._router = router
        self._tls = tls
        self._guard = None if tls is None else Guard(NOT_FOR_EDGES)
        self._rates, self._quotas = Rates(), Quotas()
        self._on_ready = on_ready
        self._fence = 0
        self._supervisor_failed: int | None = None
        self._streams: dict[WorkerId, object] = {}  # the latest stream of each worker
        self._server = new_server(ROUTER_STREAMS_MAX)
        calls: dict[str, Call] = {
            "Place": self._place,
            "PlaceAll": self._place_all,
            "Budgets": self._budgets,
            "Lost": self._lost,
            "Status": self._status,
            "Out": self._out,
            "Count": self._count,
            "Quota": self._quota,
            **CatalogueServer().calls(),
        }
        orders = {kind.__name__: _ordered(kind, self._obey) for kind in get_args(RouterOrder)}
        if supervisor is not None:
            calls["Missed"] = partial(self._missed, supervisor)
            for kind in get_args(SupervisorOrder):
                orders[kind.__name__] = _ordered(kind, lambda _, order: supervisor.carry_out(order))
        methods: dict[str, Handler] = {
            "Report": grpc.stream_stream_rpc_method_handler(self._report),
            "Memory": grpc.stream_stream_rpc_method_handler(self._memory),
            **{name: _unary(call) for name, call in calls.items()},
        }
        self._serve("tidemill.Router", methods)
        self._serve("tidemill.Orders", {name: _unary(call) for name, call in orders.items()})

    def _serve(self, service: str, methods: "dict[str, Handler]") -> None:
        if self._guard is not None:
            methods = {name: self._guard.guarded(name, method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

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

        async def tick() -> None:
            self._router.tick()

        await every(TICK_S, tick, "silent workers")

    async def stop(self) -> None:
        await self._server.stop(grace=None)

    async def _place(self, data: bytes) -> bytes:
        try:
            return encode_placement(await self._router.place(decode_placement_request(data)))
        except (Overloaded, Poisonous) as error:
            return encode_placement(error)

    async def _place_all(self, data: bytes) -> bytes:
        return encode_placements(map(self.place_now, decode_placement_requests(data)))

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
            async with _refusing(context):
                async for data in frames:
                    heartbeat = decode_heartbeat(data)
                    if worker is None:
                        worker = heartbeat.info.worker
                        self._streams[worker] = stream
                        self._on_ready(heartbeat.info.name)
                    elif heartbeat.info.worker != worker:
                        raise Malformed(f"{worker} reports for {heartbeat.info.worker}")
                    ack = self._router.heartbeat(heartbeat)
                    if self._guard is not None and self._guard.revoked:
                        ack = replace(ack, revoked=self._guard.revoked)
                    await context.write(encode(ack))
        finally:
            if worker is not None and self._streams.get(worker) is stream:
                del self._streams[worker]
                self._router.report_lost(worker)

    async def _memory(self, frames: AsyncIterator[bytes], context: "Context") -> None:
        """Send a worker of another fleet its budget, which it keeps for a while when silent."""
        async with _refusing(context):
            async for data in frames:
                budget_bytes = self._router.budget_for(decode_heartbeat(data))
                await context.write(encode(Ack(budget_bytes=budget_bytes)))

    async def _budgets(self, _: bytes) -> bytes:
        return encode(self._router.budgets())

    async def _lost(self, data: bytes) -> bytes:
        loss = decode(LossReport, data)
        self._router.report_lost(loss.worker, loss.content)
        return b""

    async def _status(self, _: bytes) -> bytes:
        status = replace(self._router.status(), failed_rounds=FAILED_ROUNDS.total())
        return encode(replace(status, supervisor_failed_rounds=self._supervisor_failed))

    async def _missed(self, supervisor: FleetSupervisor, data: bytes) -> bytes:
        """Pass on the report of an edge, and learn what the supervisor has counted."""
        sent = decode(EdgeReport, data)
        resets = await supervisor.report(sent.edge, sent.misses, sent.resets, sent.open_requests)
        with suppress(Unserved, AttributeError):  # away, or of a version without this method
            self._supervisor_failed = await supervisor.failed_rounds()
        return encode(resets)

    async def _out(self, data: bytes) -> bytes:
        return encode(self._router.silent_workers(decode(frozenset[WorkerId], data)))

    async def _count(self, data: bytes) -> bytes:
        asked, now_s = decode(RateCount, data), asyncio.get_running_loop().time()
        return encode(self._rates.count(asked.name, max(1, asked.per_minute), now_s, asked.ahead_s))

    async def _quota(self, data: bytes) -> bytes:
        return encode(self._quotas.ask(decode(QuotaRequest, data), asyncio.get_running_loop().time()))

    async def _obey(self, fence: int, order: RouterOrder) -> None:
        if fence and fence < self._fence:
            raise Unserved(f"the supervisor {fence} was replaced by {self._fence}")
        self.fence(fence)
        self._router.carry_out(order)


@asynccontextmanager
async def _refusing(context: "Context") -> AsyncGenerator[None]:
    """Turn the errors that callers expect into statuses of gRPC."""
    try:
        yield
    except Unserved as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except Malformed as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _unary(call: Call) -> "Handler":
    async def method(data: bytes, context: "Context") -> bytes:
        async with _refusing(context):
            return await call(data)
        raise AssertionError("a refused call has raised")

    return grpc.unary_unary_rpc_method_handler(method)


def _ordered(kind: type[Order[Any]], carry_out: Callable[[int, Any], Awaitable[object]]) -> Call:
    """Return the call for orders of this kind, which come with a fencing number."""

    async def call(data: bytes) -> bytes:
        fence, order = decode(tuple[int, kind], data)
        try:
            return encode(Answer(await carry_out(fence, order)))
        except RequestError as error:
            return encode(Answer(refused=Refused.of(error)))

    return call
