"""Shares the calls of the public gRPC server among its clients: those of health and reflection count too."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from tidemill.cluster.edge.grpc_api.errors import refusal_of
from tidemill.cluster.edge.requests.api_keys import ApiKeys
from tidemill.cluster.edge.requests.limits import InFlightLimit, client_of
from tidemill.workers.messages import Overloaded, RequestError

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class CallShares(grpc.aio.ServerInterceptor):
    """Counts calls from their start, before any message, to their end."""

    def __init__(self, calls_max: int, keys: ApiKeys, address_of: Callable[[str], str]) -> None:
        """`address_of` returns the address of a peer."""
        self.calls = InFlightLimit(calls_max, "calls")
        self._keys = keys
        self._address_of = address_of

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
        return client_of(tenant, self._address_of(context.peer()))


def address_of(peer: str) -> str:
    """Return the address of a peer like ipv6:%5B::1%5D:4711."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def headers_of(context: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the metadata that is text; of several values for a name, the last."""
    metadata = context.invocation_metadata() or ()
    return {name: value for name, value in metadata if isinstance(value, str)}
