"""The bounds of HTTP/2 frames in front of the gRPC library."""

import asyncio
from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest
from benchmarks.serving.grpc_attacks import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HEADLESS,
    OPENING,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    frame,
    opened,
)

from tests.support import grpc_loop
from tests.support.cluster.fake_service import FakeService, saying
from tests.support.cluster.grpc_edge import HELLO, serving
from tidemill.cluster.edge.grpc_api.frames import (
    BLOCK_BYTES_MAX,
    BLOCK_FRAMES_MAX,
    FRAMES_BURST,
    FRAMES_PER_S,
    FrameBounds,
)

EMPTY = frame(CONTINUATION, 0, 1)


def admits(data: bytes, cuts: int = 0) -> bool:
    bounds = FrameBounds(lambda: 0.0)
    rng = Random(cuts)
    at = [0, *sorted(rng.randrange(len(data)) for _ in range(cuts)), len(data)]
    return all(bounds.admit(data[start:end]) for start, end in pairwise(at))


@pytest.mark.parametrize("cuts", [0, 5, 500])
def test_frames_are_counted_wherever_they_are_cut(cuts: int) -> None:
    call = opened(1) + frame(DATA, 0, 1, bytes(16384)) * 20 + frame(WINDOW, 0, 0, bytes(4)) * 5000
    assert admits(OPENING + call, cuts)
    rest = frame(CONTINUATION, 0, 1, bytes(8000))
    assert admits(OPENING + frame(HEADERS, 0, 1, bytes(8000)) + rest * 3, cuts)
    assert not admits(OPENING + frame(HEADERS, 0, 1, bytes(8000)) + rest * 4, cuts)


def test_a_block_of_headers_has_bounds_of_bytes_and_of_frames() -> None:
    last = frame(CONTINUATION, END_HEADERS, 1)
    assert not admits(OPENING + frame(HEADERS, 0, 1, bytes(BLOCK_BYTES_MAX + 1)))
    assert not admits(HEADLESS + EMPTY * BLOCK_FRAMES_MAX)
    assert admits(OPENING + (frame(HEADERS, 0, 1) + EMPTY * (BLOCK_FRAMES_MAX - 2) + last) * 9)


@pytest.mark.parametrize(
    "idle",
    [
        frame(PING, 0, 0, bytes(8)),
        frame(SETTINGS, 0, 0),
        frame(SETTINGS, ACK, 0),
        frame(RST, 0, 1, bytes(4)),
        frame(DATA, 0, 1),
        frame(99, 0, 1),
    ],
)
def test_frames_without_data_have_a_rate(idle: bytes) -> None:
    now_s = 0.0
    bounds = FrameBounds(lambda: now_s)
    assert bounds.admit(OPENING + idle * (FRAMES_BURST - 1))
    now_s = 1.0
    assert bounds.admit(idle * FRAMES_PER_S)
    assert not bounds.admit(idle)


def test_ends_of_calls_are_data() -> None:
    assert admits(OPENING + frame(DATA, END_STREAM, 1) * 2 * FRAMES_BURST)


def test_client_beyond_the_bounds_is_cut_and_others_are_served() -> None:
    async def main() -> None:
        async with serving(FakeService(saying("a"))) as client, asyncio.timeout(10):
            host, port = client.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(HEADLESS + EMPTY * BLOCK_FRAMES_MAX)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            assert (await client.generate(HELLO)).choices[0].text == "a"

    grpc_loop.run(main())
