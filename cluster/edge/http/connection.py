"""One connection of a client: what it may send before it is answered, and how long it may take.

middleware.py limits the body of a request, which can still be answered, and
cluster/listener.py what comes before it over TLS.
"""

import asyncio
import json

import httptools
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tidemill.cluster.edge.requests.errors import error_body
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.listener import InFlightLimit, client_of
from tidemill.workers.messages import Overloaded

HEAD_BYTES_MAX = 64 << 10
"""The most bytes of a request line with its headers, of trailers, and of what surrounds a chunk of a body."""

SLICE_BYTES = 16 << 10
"""The parser gets what arrives in slices of this size, after each of which the limits are checked."""

WAITING_MAX = 16
"""The most requests of a connection that wait for the answer to an earlier one."""

TAKEN_BYTES_MIN = 16 << 10
"""A client that takes less of what waits for it in one period of `send_s_max` reads too slowly."""


BODY_WRITER = "tidemill.body_writer"
"""The extension of an ASGI scope that holds the `writer` of its reply."""


class BodyWriter:
    """Writes chunks of a reply's body past the layers of ASGI, with the bytes that they would have."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, chunk: bytes) -> bool:
        """Write a chunk, unless the body has not begun or has ended, or the client does not read fast
        enough. Return whether it was written."""
        cycle = self._cycle
        if cycle.chunked_encoding is not True or cycle.flow.write_paused:
            return False
        if cycle.response_complete or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """Return the writer of this request's reply, or None if another server than ours has it."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER, {}).get("writer")
    return writer


UPGRADING = {b"connection", b"upgrade", b"http2-settings"}
"""The headers of a request that asks for another protocol, which we ignore (RFC 9110, 7.8)."""


class _Parser(httptools.HttpRequestParser):
    """Stops at a request for another protocol, of which a new parser reads the body."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._connection = connection

    def feed_data(self, data: bytes) -> None:  # pyrefly: ignore[bad-override]  all that we pass
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.get_method() == b"CONNECT":
                raise
            self._connection.go_on(data[upgrade.args[0] :])


class Connection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with limits.

    uvicorn keeps heads of any length, and goes on reading while requests wait for their turn.
    It stops the application at 64 KiB that the client has not taken and would wait forever; what it
    closes it flushes first, forever as well. Aborting a connection ends its requests like any disconnect.
    """

    limits: EdgeLimits
    places: InFlightLimit  # of all connections, which addresses share
    place: str | None = None  # the address for which it is counted
    _requests = 0  # whose headers have arrived and whose answer is not complete
    _is_in_head = False
    _head_bytes = 0  # since the last complete head, piece of a body, or message
    _head_due: asyncio.TimerHandle | None = None
    _send_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._pieces: list[bytes] = []
        self.flow = _Turns(transport, self)
        if self.place is None:
            client = client_of(None, self.client and self.client[0])
            try:
                self.places.take(1, client)
            except Overloaded:
                transport.abort()
                return
            self.place = client
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._requests == 0:
            self._await_head()
        for start in range(0, len(data), SLICE_BYTES):
            part = data[start : start + SLICE_BYTES]
            self._head_bytes += len(part)
            super().data_received(part)
            self._pass_body()
            if self.transport.is_closing():
                return
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
                return
            if len(self.pipeline) > WAITING_MAX:
                self.transport.abort()
                return

    def go_on(self, rest: bytes) -> None:
        """Read a request that asked for another protocol once more, without that."""
        version = self.scope["http_version"].encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in UPGRADING]
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]) + rest)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._await_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        if self._is_upgrade():
            return
        self._requests += 1
        self._forget_head()
        if not self.flow.write_paused:  # a client that sends again has read what came before
            self._forget_reader()
        super().on_headers_complete()
        if getattr(self.cycle, "scope", None) is self.scope:  # else it is no request of HTTP
            if self.scope["http_version"] == "1.0":
                _leave_out_chunks(self.cycle)
            self.scope["extensions"] = {BODY_WRITER: {"writer": BodyWriter(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._pieces.append(body)

    def _pass_body(self) -> None:
        """Pass on the pieces of a body in one: uvicorn copies what waits for the application with each."""
        if self._pieces:
            whole = b"".join(self._pieces)
            self._pieces.clear()
            super().on_body(whole)

    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if self._is_upgrade():
            return
        self._pass_body()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._forget_reader()
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._requests -= 1
        super().on_response_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()  # the next request, if one waited, has begun
        if self.transport.get_write_buffer_size():
            self._await_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.place is not None:
            self.places.give(1, self.place)
            self.place = None
        self._forget_head()
        self._forget_reader()

    def _refuse_head(self) -> None:
        """Close the connection, with an answer unless that would be taken for an earlier request's."""
        if self._requests:
            self.transport.abort()
            return
        reason = f"the URL and the headers have more than {HEAD_BYTES_MAX >> 10} KiB: send less"
        body = json.dumps(error_body(431, reason, None, "headers_too_large")).encode()
        about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        head = f"HTTP/1.1 431 Request Header Fields Too Large\r\n{about}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(self.limits.headers_s_max, self._end_head)

    def _end_head(self) -> None:
        self._head_due = None
        if self.pipeline:  # the rest is not read yet
            self._await_head()
        else:
            self.transport.abort()

    def _forget_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _await_reader(self) -> None:
        if self._send_due is None:
            self._look_again()

    def _look_again(self) -> None:
        waiting_bytes = self.transport.get_write_buffer_size()
        self._send_due = self.loop.call_later(self.limits.send_s_max, self._look_at_reader, waiting_bytes)

    def _look_at_reader(self, before_bytes: int) -> None:
        waiting_bytes = self.transport.get_write_buffer_size()
        if waiting_bytes == 0:
            self._send_due = None
        elif waiting_bytes > before_bytes - TAKEN_BYTES_MIN:
            self.transport.abort()
        else:
            self._look_again()

    def _forget_reader(self) -> None:
        if self._send_due is not None:
            self._send_due.cancel()
            self._send_due = None


def _leave_out_chunks(cycle: RequestResponseCycle) -> None:
    """Have a reply end with its connection, before it begins: HTTP/1.0 knows no chunks.

    uvicorn writes chunks wherever a reply states no length, and checks the length of one without chunks.
    """
    cycle.chunked_encoding = False
    send: Send = cycle.send  # pyrefly: ignore[bad-assignment]  a Message, as uvicorn has it

    async def send_plainly(message: Message) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plainly  # pyrefly: ignore[bad-assignment]


class _Turns(FlowControl):
    """The flow of a connection, which reads nothing more while a request waits for an earlier answer."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.pipeline:
            super().resume_reading()


def with_limits(limits: EdgeLimits) -> type[Connection]:
    """Return the protocol with these limits, as uvicorn takes it: `http=with_limits(limits)`."""
    places = InFlightLimit(limits.connections_max, "connections")
    return type("LimitedConnection", (Connection,), {"limits": limits, "places": places})
