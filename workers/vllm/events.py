"""Receive the KV events of a server over ZMQ, which the extra `events` brings."""

import logging

import msgspec
import zmq

from tidemill.workers.vllm.prefixes import EventBatch, Prefixes

BATCHES_MAX = 256
"""The most batches that one call takes: requests wait meanwhile."""

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(EventBatch)


class Subscription:
    """Receives batches, numbered from 0, and applies them in `pump`."""

    def __init__(self, address: str | None = None) -> None:
        """Connect to a server; without an address let one connect to `port` of loopback. Raises
        zmq.ZMQError."""
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._next: int | None = None
        self.port: int = 0
        if address is None:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        else:
            self._socket.connect(address)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def pump(self, prefixes: Prefixes) -> None:
        """Apply what has come. After a gap in the numbers the server may have dropped anything."""
        for _ in range(BATCHES_MAX):
            if self._socket.closed or not self._socket.poll(0):
                return
            _topic, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if self._next is not None and sequence != self._next:
                log.warning("KV events %d to %d of vLLM are lost", self._next, sequence - 1)
                prefixes.clear()
            self._next = sequence + 1
            prefixes.apply(_decoder.decode(payload))
