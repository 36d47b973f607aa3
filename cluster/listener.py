"""Listens for strangers: what they hold is counted from the start of a connection, and shared by address.

A handshake of TLS takes some 60 KiB of memory and 1 ms of the event loop, without a request.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import Any, Protocol, cast

from tidemill.workers.messages import Overloaded

RETRY_S = 1.0
ACCEPTED_MAX = 64
"""The most connections that are accepted in one iteration of the event loop."""

HANDSHAKES_MAX = 128
"""The most handshakes in progress, which addresses share. The other connections wait unread."""

HANDSHAKE_S_MAX = 10.0
"""The time from the start of a connection to the end of its handshake."""

FULL_PAUSE_S = 1.0
"""The pause of a listener after the system has refused it another connection, as asyncio has it."""


class InFlightLimit:
    """Counts what is in progress and refuses the excess, and also a client that holds too much.

    A client may hold as much as is free: one alone half of all, the next one half of the rest, and there is
    always something for another.
    """

    def __init__(self, most: int, what: str) -> None:
        """`what` is counted, for messages."""
        self._most = most
        self._what = what
        self._held: dict[str, int] = {}  # by client, none of them 0
        self.held = 0

    def take(self, amount: int, client: str) -> None:
        """Count `amount` more for a client. Raises Overloaded and counts nothing then."""
        held = self._held.get(client, 0)
        if held + amount > self._most - self.held:
            raise Overloaded(
                f"this frontend has {self.held} {self._what}, {held} of them yours, and takes at most "
                f"{self._most}, from one client half of what others leave",
                predicted_s=0.0,
                retry_after_s=RETRY_S,
            )
        self._set(client, held + amount)

    def give(self, amount: int, client: str) -> None:
        self._set(client, self._held.get(client, 0) - amount)

    @contextmanager
    def holding(self, amount: int, client: str) -> Generator[None]:
        """Count `amount` inside the block. Raises Overloaded."""
        self.take(amount, client)
        try:
            yield
        finally:
            self.give(amount, client)

    def _set(self, client: str, held: int) -> None:
        self.held += held - self._held.pop(client, 0)
        assert held >= 0, self._what
        if held:
            self._held[client] = held

    def check(self) -> None:
        """Assert that the sum is that of all clients."""
        assert self.held == sum(self._held.values()) <= self._most, self._what
        assert all(held > 0 for held in self._held.values()), self._what


def client_of(tenant: str | None, address: str | None) -> str:
    """Return who shares a limit: a tenant, or without keys an address (of IPv6 its /64, which one client
    has)."""
    if tenant is not None:
        return f"tenant:{tenant}"
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or IPv6Network((parsed.packed[:8] + bytes(8), 64)))


def accept_some(listener: socket.socket) -> Iterator[tuple[socket.socket, Any]]:
    """Yield up to ACCEPTED_MAX connections, with their addresses. Those that are closed already are dropped.
    Raises OSError without a descriptor or memory."""
    for _ in range(ACCEPTED_MAX):
        try:
            accepted, address = listener.accept()
        except BlockingIOError:
            return
        except ConnectionAbortedError:
            continue
        accepted.setblocking(False)  # noqa: FBT003 - its only argument
        if _is_closed(accepted):
            accepted.close()
        else:
            yield accepted, address


def _is_closed(accepted: socket.socket) -> bool:
    if accepted.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # reset, perhaps after bytes that can be read
        return True
    try:
        return not accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


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
    """Accepts the connections of a socket, some per iteration of the event loop, and shakes hands."""

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
            for accepted, address in accept_some(self._listener):
                self._begin(accepted, client_of(None, address[0]))
        except OSError:  # no descriptor or memory
            self._loop.remove_reader(self._listener)
            self._resume = self._loop.call_later(FULL_PAUSE_S, self._listen)

    def _begin(self, accepted: socket.socket, client: str) -> None:
        try:
            self._places.take(1, client)
        except Overloaded:
            accepted.close()
            return
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
