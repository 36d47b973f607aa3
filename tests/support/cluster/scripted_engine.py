"""Both ends of a data plane for tests: edges, and an engine that follows a script."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support import grpc_loop
from tidemill.cluster.messages import TokenSink
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import (
    ClientFrame,
    StreamItem,
    decode_worker_frame,
    encode_client_frame,
)
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.worker.server import ServerLimits, WorkerServer
from tidemill.workers.messages import (
    Delta,
    Produced,
    Provenance,
    Request,
    WorkerId,
)
from tidemill.workers.scheduling.isolation import Notify

WORKER = WorkerId("decode-0.1")
WAIT_S_MAX = 10.0


@dataclass
class ScriptedEngine:
    """An engine whose `step` gives running calls the items of the test together, as a step loop does."""

    calls: dict[str, asyncio.Queue[Delta | Produced | Exception]] = field(
        default_factory=dict[str, asyncio.Queue[Delta | Produced | Exception]]
    )
    begun: list[str] = field(default_factory=list[str])  # kinds of calls, in order
    notifiers: dict[str, Notify | None] = field(default_factory=dict[str, Notify | None])
    released: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self, tenant: str, name: str) -> None:
        self.released.append((tenant, name))
        self.changed.set()

    async def generate(
        self, request: Request, notify: Notify | None = None, sink: TokenSink | None = None
    ) -> AsyncGenerator[Delta]:
        del sink
        self.notifiers[request.request_id] = notify
        with_queue = self._open("generate", request)
        try:
            while True:
                item = await with_queue.get()
                if isinstance(item, Exception):
                    raise item
                assert isinstance(item, Delta)
                yield item
        finally:
            self._close(request)

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        self.notifiers[request.request_id] = notify
        return await self._answer("produce", request)

    async def prefetch(self, request: Request) -> Produced:
        return await self._answer("prefetch", request)

    def step(self, *items: tuple[str, Delta | Produced | Exception]) -> None:
        for request_id, item in items:
            self.calls[request_id].put_nowait(item)

    async def until(self, holds: Callable[["ScriptedEngine"], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not holds(self):
                self.changed.clear()
                await self.changed.wait()

    async def _answer(self, kind: str, request: Request) -> Produced:
        queue = self._open(kind, request)
        try:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            assert isinstance(item, Produced)
            return item
        finally:
            self._close(request)

    def _open(self, kind: str, request: Request) -> asyncio.Queue[Delta | Produced | Exception]:
        self.begun.append(kind)
        queue = self.calls[request.request_id] = asyncio.Queue()
        self.changed.set()
        return queue

    def _close(self, request: Request) -> None:
        del self.calls[request.request_id]
        self.changed.set()


@asynccontextmanager
async def serving(limits: ServerLimits | None = None) -> AsyncGenerator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine()
    plane = WorkerServer(engine, WORKER, limits)
    try:
        yield engine, await plane.start("127.0.0.1")
    finally:
        await plane.stop()


@asynccontextmanager
async def frontend(unread_items_max: int = 64) -> AsyncGenerator[WorkerClients]:
    peers = WorkerClients(unread_items_max)
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


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    grpc_loop.run(coroutine, 3 * WAIT_S_MAX)


def request(name: str = "r") -> Request:
    return Request(request_id=name, tokens=(1, 2, 3), max_new_tokens=8)


async def collect(deltas: AsyncGenerator[Delta]) -> list[Delta]:
    async with aclosing(deltas) as stream:
        return [delta async for delta in stream]


async def fails(awaitable: Awaitable[object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        await awaitable
    return str(caught.value)


FIRST = Delta(tokens=(7,), provenance=Provenance(fetched_tokens=2, computed_tokens=1))
LAST = Delta(tokens=(8, 9), finish="stop")
