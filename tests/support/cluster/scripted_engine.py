"""Both ends of a data plane for tests: edges, and a worker whose engine a test steps."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tests.support.cluster.fake_engine import FakeEngine
from tests.support.waits import WAIT_S_MAX
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import (
    ClientFrame,
    StreamItem,
    decode_worker_frame,
    encode_client_frame,
)
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.worker.server import ServerLimits, WorkerServer
from tidemill.workers.inbox import generated
from tidemill.workers.messages import (
    Delta,
    Provenance,
    Request,
    WorkerId,
)

WORKER = WorkerId("decode-0.1")


@asynccontextmanager
async def serving(
    limits: ServerLimits | None = None, tls: MutualTls | None = None
) -> AsyncGenerator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    plane = WorkerServer(engine, WORKER, limits, tls=tls)
    try:
        yield engine, await plane.start("127.0.0.1")
    finally:
        await plane.stop()


@asynccontextmanager
async def frontend(unread_items_max: int = 64, tls: MutualTls | None = None) -> AsyncGenerator[WorkerClients]:
    peers = WorkerClients(unread_items_max, tls=tls)
    try:
        yield peers
    finally:
        await peers.close()


class RawStream:
    """A frontend that sends and sees bytes."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - gRPC's call object has no public type at run time
        self.call = call

    async def send(self, *frames: ClientFrame) -> None:
        for frame in frames:
            await self.call.write(encode_client_frame(frame))

    async def frame(self) -> list[StreamItem]:
        async with asyncio.timeout(WAIT_S_MAX):
            return decode_worker_frame(await self.call.read())


@asynccontextmanager
async def raw_stream(address: str) -> AsyncGenerator[RawStream]:
    async with open_channel(address) as channel:
        yield RawStream(channel.stream_stream("/tidemill.Worker/Stream")())


def request(name: str = "r") -> Request:
    return Request(request_id=name, tokens=(1, 2, 3), max_new_tokens=8)


def answer_of(
    peers: WorkerClients, request: Request, address: str, worker: WorkerId = WORKER
) -> AsyncGenerator[Delta]:
    """Yield the answer of a worker. Its reader is behind while it does not ask for the next delta."""
    return generated(lambda emit: peers.stream(worker, address, request, emit))


async def collect(deltas: AsyncGenerator[Delta]) -> list[Delta]:
    async with aclosing(deltas) as stream:
        return [delta async for delta in stream]


async def fails(awaitable: Awaitable[object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        await awaitable
    return str(caught.value)


FIRST = Delta(tokens=(7,), provenance=Provenance(fetched_tokens=2, computed_tokens=1))
LAST = Delta(tokens=(8, 9), finish="stop")
