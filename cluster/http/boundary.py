"""The outermost layer: bodies of bounded size come in, every reply carries the request's id."""

from collections.abc import Callable
from contextlib import nullcontext

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.cluster.http.bounds import Bound, EdgeLimits
from tidemill.cluster.http.errors import error_of, retry_headers
from tidemill.workers.messages import Overloaded, RequestError

BODY_BYTES_MAX = 4 << 20
REQUEST_ID_CHARS_MAX = 128
REQUEST_ID_HEADER = "x-request-id"


class Boundary:
    """ASGI middleware. Reads the body before the application does, and no more of it than is allowed."""

    def __init__(
        self, app: ASGIApp, new_id: Callable[[], str], count: Callable[[int], None], limits: EdgeLimits
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._count = count
        self._requests = Bound(limits.requests_max, "requests")
        self._bytes = Bound(limits.body_bytes_max, "bytes of bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID_HEADER)) or self._new_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        body = _Body(self._bytes)
        try:
            # what only looks is answered also when the edge is full
            with self._requests.holding(1) if scope["method"] == "POST" else nullcontext():
                if not await body.read(headers, receive):
                    return

                async def receive_after_body() -> Message:
                    return body.message() or await receive()

                await self._app(scope, receive_after_body, send_with_id)
        except (RequestError, Overloaded) as error:
            status, reply = error_of(error)
            self._count(status)
            # the rest of the body is not read, so the connection cannot be used again
            again = {"connection": "close"} | (retry_headers(error) or {})
            await JSONResponse(reply, status, again)(scope, receive, send_with_id)
        finally:
            body.drop()


class _Body:
    """The body of one request, within the bound on all of them until it is dropped."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._num_bytes = 0
        self._whole: bytes | None = None

    async def read(self, headers: Headers, receive: Receive) -> bool:
        """All of it; false when the client went away before. Raises RequestError if it is too large, and
        Overloaded."""
        too_large = RequestError(
            f"the body is larger than {BODY_BYTES_MAX >> 20} MiB: send less",
            status=413,
            code="body_too_large",
        )
        if int(headers.get("content-length", "0")) > BODY_BYTES_MAX:
            raise too_large
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part: bytes = message.get("body", b"")
            self._bound.take(len(part))
            self._num_bytes += len(part)
            if self._num_bytes > BODY_BYTES_MAX:
                raise too_large
            parts.append(part)
            if not message.get("more_body", False):
                self._whole = b"".join(parts)
                return True

    def message(self) -> Message | None:
        """The body as the application receives it, once."""
        if self._whole is None:
            return None
        body, self._whole = self._whole, None
        return {"type": "http.request", "body": body, "more_body": False}

    def drop(self) -> None:
        self._bound.give(self._num_bytes)
        self._num_bytes = 0


def _request_id(given: str | None) -> str | None:
    """The client's own id when it can be sent back as it is."""
    if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable():
        return given
    return None
