"""A thread that sends batches of KV events over ZMQ, as vLLM does. It is loaded on demand.

    PUB      topic, number (8 bytes, big-endian), MessagePack of an EventBatch
    ROUTER   takes a number, and returns the batches from it on as far as the buffer has them, then an end

Nothing here waits for a subscriber. A slow one misses batches, which it sees by the numbers.
"""

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from ipaddress import ip_address

import msgspec
import zmq

from tidemill.workers.engine.kv_events import EventBatch, EventForm, IndexBatch, events_of
from tidemill.workers.settings import KvEventSettings, SettingsError

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""

NUMBER_BYTES = 8
CLOSE_S_MAX = 5.0
LINGER_MS = 500

log = logging.getLogger(__name__)


class ZmqPublisher:
    """The queue of batches, and the thread that empties it."""

    def __init__(self, settings: KvEventSettings, form: EventForm) -> None:
        """Open the sockets. Raises SettingsError."""
        self.wants_all = False
        self._settings = settings
        self._form = form
        self._queue: deque[IndexBatch] = deque()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._closing = False
        self._context = zmq.Context()
        self._public = self._open(zmq.PUB, settings.endpoint, settings.hwm)
        replay = settings.replay_endpoint
        self._replay = None if replay is None else self._open(zmq.ROUTER, replay, settings.buffer_steps + 1)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, batch: IndexBatch) -> None:
        self._queue.append(batch)
        self._wake_up()

    def make_room(self) -> int:
        """Drop all that waits if the queue is full, and return how many batches."""
        num = len(self._queue)
        if num < self._settings.max_queue_size:
            return 0
        self._queue.clear()
        return num

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        self._closing = True
        self._wake_up()
        self._thread.join(CLOSE_S_MAX)
        os.close(self._wake)

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the thread will wake up
            os.write(self._wake, b"\0")

    def _open(self, kind: int, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = LINGER_MS
        socket.ipv6 = "[" in endpoint
        try:
            if kind == zmq.ROUTER or is_bound(endpoint):
                socket.bind(with_rank(endpoint, self._settings.rank))
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            bound = with_rank(endpoint, self._settings.rank)
            self._context.destroy(linger=0)
            raise SettingsError(
                f"--kv-events-config: cannot listen at {bound} ({error}): choose a port that is free, "
                "and for replays one that no other worker's events use"
            ) from error
        return socket

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not (self._closing and not self._queue):
            ready = dict(poller.poll())
            if self._woken in ready:
                os.read(self._woken, 1 << 16)
            with suppress(IndexError):  # the queue is empty
                while True:
                    self._send(self._queue.popleft(), encoder)
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._context.destroy(linger=LINGER_MS)
        os.close(self._woken)

    def _send(self, batch: IndexBatch, encoder: msgspec.msgpack.Encoder) -> None:
        events = EventBatch(batch.ts, [*events_of(batch, self._form)], self._settings.rank)
        payload = encoder.encode(events)
        self._buffer.append((batch.number, payload))
        self._public.send_multipart((self._topic, batch.number.to_bytes(NUMBER_BYTES, "big"), payload))

    def _answer(self, socket: "zmq.Socket[bytes]") -> None:
        """Send the batches that a subscriber asks for. If the first is lost, the next has everything."""
        client, *frames = socket.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != NUMBER_BYTES:
            log.warning("a request for a replay is not an empty frame and a number of %d bytes", NUMBER_BYTES)
            return
        start = int.from_bytes(frames[1], "big")
        if len(self._buffer) == self._buffer.maxlen and start < self._buffer[0][0]:
            self.wants_all = True
        for number, payload in self._buffer:
            if number >= start:
                socket.send_multipart(
                    (client, b"", self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload)
                )
        socket.send_multipart((client, b"", b"", END, b""))

    @property
    def _topic(self) -> bytes:
        return self._settings.topic.encode()


def is_bound(endpoint: str) -> bool:
    """Return whether a worker listens at `endpoint`: at all addresses (*), loopback or a file."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host in {"*", "localhost"}:
        return True
    try:
        return ip_address(host).is_loopback or ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def with_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one worker: its number is added to a port, and appended to a path."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{rank}" if rank else endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if int(port) else endpoint
