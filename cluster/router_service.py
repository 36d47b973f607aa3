"""A router behind a socket: places requests for frontends, and hears the workers' heartbeats."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio

from tidemill.cluster.channels import bind, new_server
from tidemill.cluster.codec import Malformed
from tidemill.cluster.placement import Ask, Route
from tidemill.cluster.router_codec import (
    decode_ask,
    decode_budget,
    decode_heartbeat,
    decode_loss,
    encode_ack,
    encode_placed,
    encode_status,
)
from tidemill.cluster.service import FleetStatus
from tidemill.workers.messages import Ack, Heartbeat, Overloaded, Poisonous, RequestError, Unserved, WorkerId

if TYPE_CHECKING:  # generic in the type stubs alone
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]

TICK_S = 0.25

log = logging.getLogger(__name__)


class Router(Protocol):
    async def place(self, ask: Ask) -> Route: ...
    def heartbeat(self, heartbeat: Heartbeat) -> Ack: ...
    def lost(self, worker: WorkerId) -> None: ...
    def tick(self) -> None: ...
    def status(self) -> FleetStatus: ...
    def set_budget(self, name: str, budget_bytes: int | None) -> None: ...


class RouterService:
    """A worker whose report breaks off is lost at once; one that only falls silent, at the router's tick."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._reports: dict[WorkerId, object] = {}  # the latest report of each worker
        self._server = new_server()
        handlers: dict[str, Handler] = {
            "Place": grpc.unary_unary_rpc_method_handler(self._place),
            "Report": grpc.stream_stream_rpc_method_handler(self._report),
            "Lost": grpc.unary_unary_rpc_method_handler(self._lost),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "SetBudget": grpc.unary_unary_rpc_method_handler(self._set_budget),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tidemill.Router", handlers),)
        )

    async def start(self, host: str, port: int = 0) -> str:
        """Listen; the address, host:port. Raises OSError."""
        address = bind(self._server, host, port)
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
            return encode_placed(await self._router.place(decode_ask(data)))
        except (Overloaded, Poisonous) as error:
            return encode_placed(error)
        except Unserved as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _report(self, frames: AsyncIterator[bytes], context: "Context") -> None:
        report = object()
        worker: WorkerId | None = None
        try:
            async for data in frames:
                heartbeat = decode_heartbeat(data)
                if worker is None:
                    worker = heartbeat.info.worker
                    self._reports[worker] = report
                elif heartbeat.info.worker != worker:
                    raise Malformed(f"{worker} reports for {heartbeat.info.worker}")
                await context.write(encode_ack(self._router.heartbeat(heartbeat)))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if worker is not None and self._reports.get(worker) is report:
                del self._reports[worker]
                self._router.lost(worker)

    async def _lost(self, data: bytes, context: "Context") -> bytes:
        try:
            worker, _ = decode_loss(data)
            self._router.lost(worker)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""

    async def _status(self, _: bytes, context: "Context") -> bytes:  # noqa: ARG002 - gRPC passes both
        return encode_status(self._router.status())

    async def _set_budget(self, data: bytes, context: "Context") -> bytes:
        try:
            self._router.set_budget(*decode_budget(data))
        except RequestError as error:
            unknown = error.status == 404
            code = grpc.StatusCode.NOT_FOUND if unknown else grpc.StatusCode.OUT_OF_RANGE
            await context.abort(code, str(error))
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""
