"""The leader's end of its links to the other ranks: sockets that only processes of this user can open.

    folder/leader    every rank connects here, and sends its index first

Frames are in order. One thread of the leader sends; a thread per link reads. So a caller that waits for an
answer may also block the sending thread, and the end of a rank is noticed whatever the others do.
"""

import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Never

from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.frames import (
    HEAD,
    INT_BYTES,
    Frame,
    Ints,
    Verb,
    decode_text,
    frame_of,
    to_bytes,
)
from tidemill.workers.settings import EngineSettings

SOCKET = "leader"
LOOK_S = 0.2
SEND_S_MAX = 10
"""The time in seconds after which a rank that reads nothing, with a full socket buffer, counts as gone."""

Ended = Callable[[], str | None]
"""Returns why one of the started ranks has ended, or None while all run."""

StartRanks = Callable[[EngineSettings, Path], Ended]
"""Starts the ranks from 1 on, each with these settings, to meet in this folder."""

Lost = Callable[[str], None]
"""Called on the reading thread when a rank is gone, with the reason."""


class RankLink:
    """The link to one rank."""

    def __init__(self, stream: BinaryIO, connection: socket.socket, index: int, lost: Lost) -> None:
        """Create a link. `stream` reads from `connection`, after its first frame."""
        self.index = index
        self.ready: Future[Ints] = _pledge()
        self._connection = connection
        self._lost = lost
        self._asked = {0: self.ready}
        self._numbers = count(1)
        self._reason = ""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_S_MAX, 0))
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

    def __init__(self, accepted: Sequence[tuple[BinaryIO, socket.socket]]) -> None:
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


@contextmanager
def meeting_place() -> Generator[tuple[Path, socket.socket]]:
    """Create a folder that only this user can open, and in it the socket that listens for the ranks. Delete
    the folder at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tidemill-group-"))
    try:
        with closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(str(folder / SOCKET))
            listener.listen()
            listener.settimeout(LOOK_S)
            yield folder, listener
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def accept(listener: socket.socket, size: int, ended: Ended) -> RankLinks:
    """Wait for the ranks 1 to `size - 1`. Raises GroupBroken when one of them has ended instead."""
    accepted: dict[int, tuple[BinaryIO, socket.socket]] = {}
    with ExitStack() as given_up:
        while len(accepted) < size - 1:
            if (reason := ended()) is not None:
                raise GroupBroken(f"a rank does not start: {reason}")
            with suppress(TimeoutError):
                connection = given_up.enter_context(listener.accept()[0])
                connection.settimeout(None)
                stream = given_up.enter_context(connection.makefile("rb"))
                accepted[_index(stream)] = (stream, connection)
        given_up.pop_all()
    assert sorted(accepted) == list(range(1, size))
    return RankLinks([accepted[index] for index in range(1, size)])


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


def _index(stream: BinaryIO) -> int:
    frame = read_frame(stream)
    if frame is None:
        raise GroupBroken("a rank ended before it had sent its index")
    assert frame.verb is Verb.HELLO
    return int(frame.body[0])


def _pledge() -> Future[Any]:
    """Return a future that cannot be cancelled."""
    pledge: Future[Any] = Future()
    pledge.set_running_or_notify_cancel()
    return pledge
