"""Shares the calls of the public gRPC server among its clients: those of health and reflection count too."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tidemill.cluster.edge.grpc_api.errors import refusal_of
from tidemill.cluster.edge.grpc_api.frames import client_at
from tidemill.cluster.edge.requests.api_keys import ApiKeys
from tidemill.cluster.listener import InFlightLimit, client_of
from tidemill.workers.messages import Overloaded, RequestError

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class CallShares(grpc.aio.ServerInterceptor):
    """Counts calls from their start, before any message, to their end."""

    def __init__(self, calls_max: int, keys: ApiKeys) -> None:
        self.calls = InFlightLimit(calls_max, "calls")
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,  # noqa: ANN401 - generic in the type stubs only
    ) -> Any:  # noqa: ANN401
        handler = await continuation(handler_call_details)
        kind = next((kind for kind in KINDS if getattr(handler, kind, None) is not None), None)
        if kind is None:  # there is no such method
            return handler
        serve = getattr(handler, kind)

        async def stream(request: object, context: Any) -> Any:  # noqa: ANN401
            await self._begin(context)
            async for message in serve(request, context):
                yield message

        async def answer(request: object, context: Any) -> Any:  # noqa: ANN401
            await self._begin(context)
            return await serve(request, context)

        return handler._replace(**{kind: stream if inspect.isasyncgenfunction(serve) else answer})

    async def _begin(self, context: Any) -> None:  # noqa: ANN401
        """Count a call, or abort it."""
        client = self._client(context)
        try:
            self.calls.take(1, client)
        except Overloaded as error:
            _, code, message, metadata = refusal_of(error)
            await context.abort(code, message, metadata)

        def end(_: object) -> None:
            self.calls.give(1, client)

        context.add_done_callback(end)

    def _client(self, context: Any) -> str:  # noqa: ANN401
        """Return the tenant of a known key, else the address."""
        try:
            tenant = self._keys.tenant(headers_of(context))
        except RequestError:
            tenant = None
        return client_of(tenant, client_at(context.peer()))


def headers_of(context: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the metadata that is text; of several values for a name, the last."""
    metadata = context.invocation_metadata() or ()
    return {name: value for name, value in metadata if isinstance(value, str)}
