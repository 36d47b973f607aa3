"""The leader's end of its links to the other ranks.

    folder/leader    on one machine: a socket that only processes of this user can open
    host:port        over several nodes: TLS, with a certificate of the cluster at both ends

Every rank connects there, and sends its index first, over several nodes with the secret of the group.
Frames are in order. One thread of the leader sends; a thread per link reads. So a caller that waits for an
answer may also block the sending thread, and the end of a rank is noticed whatever the others do.
"""

import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple, Never, TypeAlias

import numpy as np

from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.frames import (
    HEAD,
    INT_BYTES,
    Frame,
    Ints,
    Verb,
    decode_text,
    frame_of,
    ints,
    to_bytes,
)
from tidemill.workers.parallel.network import (
    SOCKET,
    Meeting,
    Network,
    Ports,
    TlsConnection,
    end_with_node,
    listen,
)
from tidemill.workers.settings import EngineSettings

LOOK_S = 0.2
HELLO_S_MAX = 5.0
"""The time in seconds that a caller on another node may take to show that it is a rank of this group."""

SECRET_BYTES = 16
SEND_S_MAX = 10
"""The time in seconds after which a rank that reads nothing, with a full socket buffer, counts as gone."""

Ended = Callable[[], str | None]
"""Returns why one of the started ranks has ended, or None while all run."""

Connection: TypeAlias = socket.socket | TlsConnection


@dataclass(frozen=True, slots=True)
class StartRanks:
    """The start of the ranks from 1 on. `start` takes the settings of each and where they meet. `network` is
    that of the leader, for ranks on other nodes."""

    start: Callable[[EngineSettings, Meeting], Ended]
    network: Network | None = None


Lost = Callable[[str], None]
"""Called on the reading thread when a rank is gone, with the reason."""


class RankLink:
    """The link to one rank."""

    def __init__(self, stream: BinaryIO, connection: Connection, index: int, lost: Lost) -> None:
        """Create a link. `stream` reads from `connection`, after its first frame."""
        self.index = index
        self.ready: Future[Ints] = _pledge()
        self._connection = connection
        self._lost = lost
        self._asked = {0: self.ready}
        self._numbers = count(1)
        self._reason = ""
        Thread(target=self._read, args=(stream,), name=f"rank-{index}", daemon=True).start()

    def send(self, verb: Verb, body: Ints) -> None:
        """Raises GroupBroken."""
        self._send(to_bytes(verb, 0, body))

    def ask(self, verb: Verb, body: Ints) -> "Future[Ints]":
        """Send a call and return its answer, which may be GroupBroken and cannot be cancelled. Raises
        GroupBroken."""
        number = next(self._numbers)
        self._asked[number] = answer = _pledge()
        if self._reason:  # the reading thread may not see this call any more
            self._fail_all()
        self._send(to_bytes(verb, number, body))
        return answer

    def close(self) -> None:
        """End the rank and the reading thread. May be called twice, and by any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise GroupBroken(self._reason or f"rank {self.index} takes nothing ({error})") from error

    def _read(self, stream: BinaryIO) -> None:
        reason = f"rank {self.index} is gone"
        try:
            with self._connection, stream:
                while (frame := read_frame(stream)) is not None:
                    if frame.verb is Verb.FAILED:
                        reason = f"rank {self.index} broke: {decode_text(frame.body)}"
                    else:
                        self._asked.pop(frame.number).set_result(frame.body)
        finally:
            self._reason = reason
            self._fail_all()
            self._lost(reason)

    def _fail_all(self) -> None:
        for number in list(self._asked):
            if (answer := self._asked.pop(number, None)) is not None:
                answer.set_exception(GroupBroken(self._reason))


class RankLinks:
    """The links to all other ranks of a group. When one is lost all are closed, which ends the ranks."""

    def __init__(self, accepted: Sequence[tuple[BinaryIO, Connection]]) -> None:
        """Create the links. `accepted` are the connections of the ranks from 1 on."""
        self._broken: Future[Never] = _pledge()
        self._all: tuple[RankLink, ...] = ()
        for index, (stream, connection) in enumerate(accepted, start=1):
            self._all = (*self._all, RankLink(stream, connection, index, self.end))
        if self._broken.done():  # while the later ones were created
            self._close()

    def __iter__(self) -> Generator[RankLink]:
        yield from self._all

    def __len__(self) -> int:
        return len(self._all)

    @property
    def broken(self) -> "Future[Never]":
        """A future that fails with GroupBroken when the group has ended; it cannot be cancelled."""
        return self._broken

    def send_all(self, verb: Verb, body: Ints) -> None:
        """Raises GroupBroken."""
        self._raise_if_broken()
        for link in self._all:
            link.send(verb, body)

    def ask(self, verb: Verb, body: Ints) -> "list[Future[Ints]]":
        """Send a call to each rank and return their answers: see RankLink.ask. Raises GroupBroken."""
        self._raise_if_broken()
        return [link.ask(verb, body) for link in self._all]

    def end(self, reason: str) -> None:
        """Break the group; the first reason counts. May be called again, and by any thread."""
        with suppress(InvalidStateError):
            self._broken.set_exception(GroupBroken(reason))
        self._close()

    def _raise_if_broken(self) -> None:
        """Raise the first reason: each link knows only that of its own end."""
        if self._broken.done():
            raise GroupBroken(str(self._broken.exception()))

    def _close(self) -> None:
        for link in self._all:
            link.close()


class MeetingPlace(NamedTuple):
    """The sockets of the leader at which the ranks find it and, over several nodes, each other."""

    meeting: Meeting
    listener: socket.socket
    store: socket.socket | None = None


@contextmanager
def meeting_place(network: Network | None = None) -> Generator[MeetingPlace]:
    """Listen for the ranks: in a new folder that only this user can open, or on ports of `network`. Close
    and delete all of it at the end. Raises OSError."""
    if network is not None:
        with listen(network.host) as listener, listen(network.host) as store:
            listener.settimeout(LOOK_S)
            ports = (listener.getsockname()[1], store.getsockname()[1])
            secret = secrets.token_bytes(SECRET_BYTES)
            meeting = Ports(host=network.host, link=ports[0], store=ports[1], secret=secret)
            yield MeetingPlace(meeting, listener, store)
        return
    folder = Path(tempfile.mkdtemp(prefix="tidemill-group-"))
    try:
        with closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(str(folder / SOCKET))
            listener.listen()
            listener.settimeout(LOOK_S)
            yield MeetingPlace(folder, listener)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def accept(place: MeetingPlace, size: int, ended: Ended, network: Network | None = None) -> RankLinks:
    """Wait for the ranks 1 to `size - 1`; drop callers that are none. Raises GroupBroken when a rank has
    ended instead."""
    accepted: dict[int, tuple[BinaryIO, Connection]] = {}
    with ExitStack() as given_up:
        while len(accepted) < size - 1:
            if (reason := ended()) is not None:
                raise GroupBroken(f"a rank does not start: {reason}")
            with suppress(OSError), ExitStack() as refused:
                plain = refused.enter_context(place.listener.accept()[0])
                plain.settimeout(None if network is None else HELLO_S_MAX)
                connection = _secured(plain, network)
                stream = refused.enter_context(connection.makefile("rb"))
                accepted[_index(stream, place.meeting)] = (stream, connection)
                plain.settimeout(None)
                seconds = struct.pack("@ll", SEND_S_MAX, 0)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
                given_up.push(refused.pop_all())
        given_up.pop_all()
    assert sorted(accepted) == list(range(1, size))
    return RankLinks([accepted[index] for index in range(1, size)])


def _secured(plain: socket.socket, network: Network | None) -> Connection:
    """Return the connection to a rank. Raises OSError when the caller has no certificate of the cluster."""
    if network is None:
        return plain
    end_with_node(plain)
    if network.certificates is None:
        return plain
    return TlsConnection(plain, network.certificates.server())


def hello(index: int, meeting: Meeting) -> bytes:
    """Return the first frame of a rank."""
    secret = meeting.secret if isinstance(meeting, Ports) else b""
    return to_bytes(Verb.HELLO, 0, np.frombuffer(ints((index,)).tobytes() + secret, np.int64))


def read_frame(stream: BinaryIO) -> Frame | None:
    """Return the next frame. None at the end of the stream, also in the middle of a frame."""
    try:
        head = stream.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        size_bytes = HEAD.unpack(head)[0] * INT_BYTES
        body = stream.read(size_bytes)
    except OSError:
        return None
    return frame_of(head, body) if len(body) == size_bytes else None


def _index(stream: BinaryIO, meeting: Meeting) -> int:
    """Return the index of a rank. Raises GroupBroken, or PermissionError when a caller from another node is
    not of this group."""
    size_bytes = len(hello(0, meeting))  # of any rank
    data = stream.read(size_bytes)
    index = int(np.frombuffer(data, np.int64, 1, HEAD.size)[0]) if len(data) == size_bytes else 0
    if compare_digest(data, hello(index, meeting)):
        return index
    if isinstance(meeting, Ports):
        raise PermissionError("a caller does not know the group")
    raise GroupBroken("a rank ended before it had sent its index")


def _pledge() -> Future[Any]:
    """Return a future that cannot be cancelled."""
    pledge: Future[Any] = Future()
    pledge.set_running_or_notify_cancel()
    return pledge
