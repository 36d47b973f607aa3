"""The outermost layer: it checks the key, bounds the body, and adds the request's id to every reply.

It also ends replies that are open when the server stops.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.cluster.edge.apis.json_bytes import event
from tidemill.cluster.edge.chat.request.hints import in_header
from tidemill.cluster.edge.chat.request.json_text import parse_json
from tidemill.cluster.edge.http.dashboard import PAGE_PATHS
from tidemill.cluster.edge.http.errors import JsonReply, shaped
from tidemill.cluster.edge.http.same_origin import check_operator, check_site
from tidemill.cluster.edge.http.stream import EventStream
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys
from tidemill.cluster.edge.requests.caller import REQUEST_ID_HEADER, request_id_of
from tidemill.cluster.edge.requests.context import StopReason
from tidemill.cluster.edge.requests.errors import error_of, headers_of
from tidemill.cluster.edge.requests.json_body import check_json_body, unpacked
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX, BODY_BYTES_PER_S, EdgeLimits
from tidemill.cluster.listener import InFlightLimit, client_of
from tidemill.workers.messages import Overloaded, RequestError, Unserved

ORDERS = frozenset({"POST", "DELETE"})
"""The methods that count as requests."""

UPLOADS = ("/v1/files",)
"""The paths that read bodies as they arrive, and keep UPLOAD_BYTES of one at most."""

UPLOAD_BYTES = 2 << 20

IGNORED_HEADER = "x-tidemill-ignored"
"""The header of a reply that names the fields of the request without an effect."""

PACED_BYTES_MIN = 8 << 10
"""Larger bodies are checked and parsed one by one."""

PAUSE_S_MAX = 0.03
PAUSED_BYTES_PER_S = 4 << 20
"""Streams go on in a pause between two such bodies, which is as long as the second one takes to parse."""

RECENT_S = 0.1
"""A body that comes this long after another such body has no pause before it."""

OPEN_PATHS = (
    frozenset({"/api/hello", "/health", "/health/live", "/health/ready", "/ping", "/metrics"}) | PAGE_PATHS
)
"""Probes and scrapers bring no keys; the page asks for one."""


class EdgeMiddleware:
    """ASGI middleware. It checks the key, then reads the body before the application does, and no more of it
    than allowed."""

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        count: Callable[[int], None],
        limits: EdgeLimits,
        keys: ApiKeys,
        stop_reason: StopReason,
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._count = count
        self._keys = keys
        self._stop_reason = stop_reason
        self._requests = InFlightLimit(limits.requests_max, "requests")
        self._bytes = InFlightLimit(limits.body_bytes_max, "bytes of bodies")
        self._body_s_max = limits.body_s_max
        self._allowed_origins = limits.allowed_origins
        self._pace = _Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get(REQUEST_ID_HEADER)) or self._new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        begun: MutableHeaders | None = None  # of the reply

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = MutableHeaders(scope=message)
                begun.update(_own_headers(scope["state"]))
            await send(message)

        body: _Body | None = None
        try:
            client = await self._admit(scope, headers)
            body = reading = _Body(self._bytes, client, self._body_s_max, self._pace)
            if not await (body.reserve() if _uploads(scope) else body.read(headers, receive)):
                return

            async def receive_after_body() -> Message:
                return reading.message() or await receive()

            # read-only requests are answered also when the edge is full
            with self._requests.holding(1, client) if scope["method"] in ORDERS else nullcontext():
                is_head = scope["method"] == "HEAD"  # the server leaves the body of its reply out
                asked = {**scope, "method": "GET"} if is_head else scope
                await self._app(asked, receive_after_body, send_with_id)
        except (RequestError, Overloaded) as error:
            await self._refuse(error, scope)(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server stops and waits no longer
            if not await self._cut(begun, scope, receive, send_with_id):
                raise
        finally:
            if body is not None:
                body.drop()

    async def _admit(self, scope: Scope, headers: Headers) -> str:
        """Admit a request and return the client that shares limits. Raises RequestError and Overloaded."""
        key: ApiKey | None = None
        if scope["path"] not in OPEN_PATHS:
            key = await self._keys.admit(scope["path"], headers)
        address = (scope.get("client") or ("",))[0]
        if not self._keys.are_needed:
            server = scope.get("server") or ("",)
            check_site(scope["method"], server[0], headers, self._allowed_origins)
            check_operator(scope["method"], scope["path"], server[0], address)
        client = client_of(None if key is None else key.tenant, address)
        scope["state"] |= {"key": key, "client": client}
        return client

    async def _cut(self, begun: Headers | None, scope: Scope, receive: Receive, send: Send) -> bool:
        """Report the cut, if the reply has not `begun` or is an event stream; return whether that was
        possible."""
        error = Unserved(self._stop_reason.text)
        if begun is None:
            await self._refuse(error, scope)(scope, receive, send)
            return True
        if begun.get("content-type", "").startswith(EventStream.media_type):
            last = event(self._error_reply(error, scope)[1], "error")
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return True
        return False

    def _refuse(self, error: Exception, scope: Scope) -> JsonReply:
        """Refuse a request. The rest of its body is not read, so the connection cannot be reused."""
        status, reply = self._error_reply(error, scope)
        return JsonReply(reply, status, {"connection": "close"} | (headers_of(error) or {}))

    def _error_reply(self, error: Exception, scope: Scope) -> tuple[int, dict[str, object]]:
        status, reply = error_of(error)
        self._count(status)
        return status, shaped(scope, status, reply)


def _uploads(scope: Scope) -> bool:
    return scope["path"] in UPLOADS and scope["method"] == "POST"


class _JsonRequest(Request):
    async def json(self) -> object:
        return parse_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is parsed faster than by starlette, with the same result."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            try:
                return await handle(_JsonRequest(request.scope, request.receive))
            except HTTPException as error:
                if isinstance(error.__cause__, RequestError):  # of the parser; FastAPI hides it
                    raise error.__cause__ from None
                raise

        return handle_parsed


def _own_headers(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of every reply: the id, and the fields of the request without an effect."""
    ignored = state.get("ignored")
    return {REQUEST_ID_HEADER: state["request_id"], "request-id": state["request_id"]} | (
        {IGNORED_HEADER: in_header(ignored)} if ignored else {}
    )


class _Pace:
    """Has larger bodies checked and parsed one by one: together they would hold the loop for their sum.

    A flood of one client does not delay the bodies of others: one of its bodies at a time waits for the
    lock of all.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._one_of = WeakValueDictionary[str, asyncio.Lock]()  # by client
        self._last_s = -inf

    @asynccontextmanager
    async def checking(self, num_bytes: int, client: str) -> AsyncGenerator[None]:
        """Check a body within the block; it is parsed right behind it, before the next one gets here."""
        time_s = asyncio.get_running_loop().time
        own = self._one_of.setdefault(client, asyncio.Lock())
        async with own, self._one:
            if time_s() < self._last_s + RECENT_S:
                await asyncio.sleep(min(PAUSE_S_MAX, num_bytes / PAUSED_BYTES_PER_S))
            try:
                yield
            finally:
                self._last_s = time_s()


class _Body:
    """The body of one request, counted against the bound on all bodies until it is dropped."""

    def __init__(self, bound: InFlightLimit, client: str, s_max: float, pace: _Pace) -> None:
        self._bound = bound
        self._pace = pace
        self._client = client
        self._s_max = s_max
        self._num_bytes = 0
        self._whole: bytes | None = None

    async def read(self, headers: Headers, receive: Receive) -> bool:
        """Read all of it; return False if the client disconnected before. Raises RequestError if it is too
        large, too slow or too complex, and Overloaded."""
        too_large = RequestError(
            f"the body is larger than {BODY_BYTES_MAX >> 20} MiB: send less",
            status=413,
            code="body_too_large",
        )
        if int(headers.get("content-length", "0")) > BODY_BYTES_MAX:
            raise too_large
        parts: list[bytes] = []
        time_s = asyncio.get_running_loop().time
        due_s = time_s() + self._s_max
        try:
            async with asyncio.timeout_at(due_s) as due:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part: bytes = message.get("body", b"")
                    self._bound.take(len(part), self._client)
                    self._num_bytes += len(part)
                    if self._num_bytes > BODY_BYTES_MAX:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
                    on_average_s = due_s + self._num_bytes / BODY_BYTES_PER_S
                    due.reschedule(min(on_average_s, time_s() + self._s_max))
        except TimeoutError as error:
            raise RequestError(
                f"the body came too slowly: {self._num_bytes} bytes of it so far",
                status=408,
                code="body_too_slow",
            ) from error
        self._whole = b"".join(parts)
        parts.clear()  # bodies that wait for their check are there once
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            self._whole = await asyncio.to_thread(unpacked, self._whole, encoding)
            if len(self._whole) > BODY_BYTES_MAX:
                raise too_large
            self._bound.take(len(self._whole), self._client)
            self._num_bytes += len(self._whole)
        is_paced = self._num_bytes > PACED_BYTES_MIN
        async with self._pace.checking(self._num_bytes, self._client) if is_paced else nullcontext():
            await check_json_body(self._whole)
        return True

    async def reserve(self) -> bool:
        """Count a body that is not read here. Raises Overloaded."""
        self._bound.take(UPLOAD_BYTES, self._client)
        self._num_bytes = UPLOAD_BYTES
        return True

    def message(self) -> Message | None:
        """Return the body as the application receives it, once."""
        if self._whole is None:
            return None
        body, self._whole = self._whole, None
        return {"type": "http.request", "body": body, "more_body": False}

    def drop(self) -> None:
        self._bound.give(self._num_bytes, self._client)
        self._num_bytes = 0
