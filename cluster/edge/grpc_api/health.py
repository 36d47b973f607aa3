"""The standard health service, grpc.health.v1: whether some model has a worker that can answer."""

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from tidemill.cluster.edge.requests.models import EdgeModels
from tidemill.kvstore.errors import TidemillError

if TYPE_CHECKING:  # generic in the type stubs only
    Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
LOOK_S = 1.0

Status = health_pb2.HealthCheckResponse
"""The health status: SERVING, NOT_SERVING or SERVICE_UNKNOWN."""


class Health:
    """The health of `services` and of the whole server, which has no name, follows the models. It needs no
    key, like /health over HTTP."""

    def __init__(self, models: EdgeModels, services: Collection[str]) -> None:
        self._models = models
        self._names = {"", *services}
        self._is_ending = False

    def methods(self) -> grpc.GenericRpcHandler:
        codec = (health_pb2.HealthCheckRequest.FromString, Status.SerializeToString)
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, *codec),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, *codec),
            },
        )

    def end(self) -> None:
        """Report that nothing is served any more, so that load balancers leave while the last answers
        finish."""
        self._is_ending = True

    async def _check(self, request: health_pb2.HealthCheckRequest, context: "Context") -> Status:
        if request.service not in self._names:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:64]!r} here"
            )
        return await self._status()

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: "Context") -> None:
        """Send each change until the client disconnects."""
        last: Status | None = None
        while True:
            known = request.service in self._names
            status = await self._status() if known else Status(status=Status.SERVICE_UNKNOWN)
            if status != last:
                await context.write(status)
                last = status
            await asyncio.sleep(LOOK_S)

    async def _status(self) -> Status:
        if self._is_ending:
            return Status(status=Status.NOT_SERVING)
        try:
            ready = await self._models.can_answer()
        except TidemillError:
            ready = False
        return Status(status=Status.SERVING if ready else Status.NOT_SERVING)
