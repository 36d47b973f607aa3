"""Disconnects clients that send their headers or read their answers too slowly.

middleware.py limits the time of a body, which can still be answered; TLS handshakes end after a minute,
which is the event loop's default.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.cluster.edge.requests.limits import EdgeLimits

TAKEN_BYTES_MIN = 16 << 10
"""A client that takes less of what waits for it in one period of `send_s_max` reads too slowly."""


class TimeoutProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with timeouts.

    uvicorn stops the application at 64 KiB that the client has not taken and would wait forever; what it
    closes it flushes first, forever as well. Aborting a connection ends its requests like any disconnect.
    """

    limits = EdgeLimits()
    _requests = 0  # whose headers have arrived and whose answer is not complete
    _headers_due: asyncio.TimerHandle | None = None
    _send_due: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]  # a Transport, as uvicorn has it
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections_max:
            transport.abort()
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._requests == 0:
            self._await_headers()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._requests += 1
        self._forget_headers()
        if not self.flow.write_paused:  # a client that sends again has read what came before
            self._forget_reader()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._forget_reader()
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._requests -= 1
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._await_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_headers()
        self._forget_reader()

    def _await_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(self.limits.headers_s_max, self.transport.abort)

    def _forget_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

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


def with_client_timeouts(limits: EdgeLimits) -> type[TimeoutProtocol]:
    """Return the protocol with these limits, as uvicorn takes it: `http=with_client_timeouts(limits)`."""
    return type("PatientProtocol", (TimeoutProtocol,), {"limits": limits})
