"""Certificates and keys of an endpoint, and the listener that limits the TLS handshakes in progress.

A handshake takes some 60 KiB of memory and 1 ms of the event loop, without a request.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from tidemill.cluster.edge.requests.api_keys import ApiKey, KeysFile
from tidemill.cluster.edge.requests.limits import InFlightLimit, client_of
from tidemill.workers.messages import Overloaded

HANDSHAKES_MAX = 128
"""The most handshakes in progress, which addresses share. The other connections wait unread."""

HANDSHAKE_S_MAX = 10.0
"""The time from the start of a connection to the end of its handshake."""

FULL_PAUSE_S = 1.0
"""The pause of a listener after the system has refused it another connection, as asyncio has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files. With `client_ca`, clients must show a certificate that it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The security of an endpoint: without keys every client is admitted, without `tls` it is plain HTTP."""

    keys: tuple[ApiKey, ...] = ()
    keys_file: KeysFile | None = None  # from which they are read again
    tls: Tls | None = None


OPEN = Security()


def tls_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Return the context of a server with these files. Raises OSError."""
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(tls.client_ca)
    return context


class Handshakes:
    """Limits the handshakes in progress. The others wait in the order of their address."""

    def __init__(self, most: int) -> None:
        self._limit = InFlightLimit(most, "handshakes")
        self._most = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by address, none of them empty

    async def begin(self, client: str) -> None:
        """Wait until another handshake of this address may begin, which `end` ends."""
        begun = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(begun)
        self._admit()
        try:
            await begun
        except asyncio.CancelledError:
            if not begun.cancelled():
                self.end(client)
            raise

    def end(self, client: str) -> None:
        self._limit.give(1, client)
        self._admit()

    def _admit(self) -> None:
        for client, waiting in list(self._waiting.items()):
            while waiting:
                if not waiting[0].cancelled():
                    try:
                        self._limit.take(1, client)
                    except Overloaded:
                        break
                    waiting[0].set_result(None)
                waiting.popleft()
            if not waiting:
                del self._waiting[client]
            if self._limit.held == self._most:
                return


class Accepted(Protocol):
    """The asyncio protocol of a connection that was counted before it began."""

    place: str | None  # the client for which it is counted, which the protocol gives back when it is lost

    @property
    def transport(self) -> object:
        """The transport; None until the connection begins."""
        ...


class Listener:
    """Accepts the connections of a socket, one per iteration of the event loop, and shakes hands."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        create: Callable[[], Accepted],
        places: InFlightLimit,
        handshakes: Handshakes,
    ) -> None:
        """`places` counts all connections. Without a context there is nothing to shake hands about."""
        self._listener = listener
        self._context = context
        self._create = create
        self._places = places
        self._handshakes = handshakes
        self._beginning: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)  # noqa: FBT003 - its only argument
        self._resume: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._resume is not None:
            self._resume.cancel()

    async def wait_closed(self) -> None:
        """End the connections that have not begun."""
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor or memory
            self._loop.remove_reader(self._listener)
            self._resume = self._loop.call_later(FULL_PAUSE_S, self._listen)
            return
        client = client_of(None, address[0])
        try:
            self._places.take(1, client)
        except Overloaded:
            accepted.close()
            return
        accepted.setblocking(False)  # noqa: FBT003 - its only argument
        protocol = self._create()
        protocol.place = client
        task = self._loop.create_task(self._shake_hands(protocol, accepted, client))
        self._beginning.add(task)
        task.add_done_callback(partial(self._end, protocol, accepted, client))

    async def _shake_hands(self, protocol: Accepted, accepted: socket.socket, client: str) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                await self._handshakes.begin(client)
                try:
                    await self._loop.connect_accepted_socket(
                        lambda: cast("asyncio.BaseProtocol", protocol), accepted, ssl=self._context
                    )
                finally:
                    self._handshakes.end(client)

    def _end(
        self, protocol: Accepted, accepted: socket.socket, client: str, task: asyncio.Task[None]
    ) -> None:
        """Give back what a connection holds that never began, even if its task never ran."""
        self._beginning.discard(task)
        if protocol.transport is None:
            self._places.give(1, client)
            accepted.close()
