"""The outermost layer: bodies of bounded size come in, every reply carries the request's id."""

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.cluster.http.errors import error_of
from tidemill.workers.messages import RequestError

BODY_BYTES_MAX = 4 << 20
REQUEST_ID_CHARS_MAX = 128
REQUEST_ID_HEADER = "x-request-id"


class Boundary:
    """ASGI middleware. Reads the body before the application does, and no more of it than is allowed."""

    def __init__(self, app: ASGIApp, new_id: Callable[[], str], count: Callable[[int], None]) -> None:
        self._app = app
        self._new_id = new_id
        self._count = count

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

        try:
            body = await _body(headers, receive)
        except RequestError as error:
            status, reply = error_of(error)
            self._count(status)
            # the rest of the body is not read, so the connection cannot be used again
            await JSONResponse(reply, status, {"connection": "close"})(scope, receive, send_with_id)
            return
        if body is None:
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_after_body() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, receive_after_body, send_with_id)


async def _body(headers: Headers, receive: Receive) -> bytes | None:
    """The whole body; None when the client went away before. Raises RequestError if it is too large."""
    too_large = RequestError(
        f"the body is larger than {BODY_BYTES_MAX >> 20} MiB: send less", status=413, code="body_too_large"
    )
    if int(headers.get("content-length", "0")) > BODY_BYTES_MAX:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > BODY_BYTES_MAX:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


def _request_id(given: str | None) -> str | None:
    """The client's own id when it can be sent back as it is."""
    if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable():
        return given
    return None
