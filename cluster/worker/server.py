"""The worker's side of the data plane: run calls of edges, and send each edge one frame per step."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import bind, new_server, server_credentials
from tidemill.cluster.rpc.codec import (
    Cancel,
    Failure,
    Generate,
    Hello,
    Malformed,
    Prefetch,
    Produce,
    StreamItem,
    Trial,
    WireItem,
    decode_client_frame,
    encode,
    first_frame,
    wire_of,
)
from tidemill.cluster.rpc.guard import Guard
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.contract.engine import StreamingEngine
from tidemill.workers.messages import (
    Delta,
    PagesMissing,
    Produced,
    RequestError,
    WorkerGone,
    WorkerId,
)

if TYPE_CHECKING:  # generic only in the type stubs
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]

log = logging.getLogger(__name__)


FLUSH_S_MAX = 4.0
"""The longest time that an edge that does not read can delay a trial. It is longer than the time until its
connection counts as broken, so the edge never blames a request that no longer runs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of one edge: concurrent calls, and items of one call that it has not received yet."""

    calls_max: int = 8192
    items_max: int = 1024
    frame_items_max: int = 4096


class WorkerServer:
    def __init__(
        self,
        engine: StreamingEngine,
        worker: WorkerId,
        limits: ServerLimits | None = None,
        tls: MutualTls | None = None,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._limits = ServerLimits() if limits is None else limits
        self._tls = tls
        self._guard = None if tls is None else Guard()
        self._streams: set[_Stream] = set()
        self._server = new_server()
        method: Handler = grpc.stream_stream_rpc_method_handler(self._serve)
        if self._guard is not None:
            method = self._guard.guarded("Stream", method)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tidemill.Worker", {"Stream": method}),)
        )

    async def start(self, host: str, port: int = 0) -> str:
        """Listen, and return the address, host:port. Raises OSError."""
        address = bind(self._server, host, port, server_credentials(self._tls))
        await self._server.start()
        return address

    def revoke(self, serials: Collection[str]) -> None:
        """Refuse the certificates of these serials, too, and end their streams."""
        if self._guard is not None:
            self._guard.revoke(serials)

    async def stop(self) -> None:
        await self._server.stop(grace=None)

    @property
    def num_calls(self) -> int:
        """The number of requests that run here, for all edges."""
        return sum(stream.num_calls for stream in self._streams)

    async def flush(self) -> None:
        """Wait until all edges have received their items, except those that do not read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S_MAX):
                for stream in list(self._streams):
                    await stream.sent.wait()

    async def _serve(self, frames: AsyncIterator[bytes], context: "Context") -> None:
        try:
            hello = decode_client_frame(await anext(frames, b""))
            if hello != Hello(self._worker):
                raise Malformed(f"this is {self._worker}: not the worker that was asked for")
            stream = _Stream(self._engine, self._limits, context.write, self.flush)
            self._streams.add(stream)
            try:
                await stream.run(frames)
            finally:
                self._streams.remove(stream)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class _Stream:
    """The calls of one edge. Items wait in `_outbox` until the frame before them is sent. So a slow edge gets
    fewer and larger frames and never delays the engine."""

    def __init__(
        self,
        engine: StreamingEngine,
        limits: ServerLimits,
        send: Callable[[bytes], Awaitable[None]],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the stream. `flush` waits until all edges have received everything, also on other
        streams."""
        self.sent = asyncio.Event()  # no item waits
        self.sent.set()
        self._engine = engine
        self._limits = limits
        self._send = send
        self._flush = flush
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._prefetches: set[int] = set()  # subset of the calls
        self._outbox: list[WireItem] = []
        self._waiting = Counter[int]()  # items in the outbox, by call
        self._filled = asyncio.Event()

    @property
    def num_calls(self) -> int:
        """The number of calls without prefetches."""
        return len(self._calls) - len(self._prefetches)

    async def run(self, frames: AsyncIterator[bytes]) -> None:
        """Serve until the edge ends the stream or vanishes. Raises Malformed."""
        sender = asyncio.create_task(self._send_items())
        try:
            async for data in frames:
                self._take(data)
        finally:
            tasks = [sender, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.sent.set()

    def _take(self, data: bytes) -> None:
        match decode_client_frame(data):
            case Cancel(tenant=tenant, name=name) if name:
                self._engine.release(tenant, name)
            case Cancel(call):
                if task := self._calls.get(call):
                    task.cancel()
            case Hello():
                raise Malformed("a second hello")
            case frame if frame.call in self._calls:
                raise Malformed(f"call {frame.call} is in use")
            case frame if len(self._calls) == self._limits.calls_max:
                self._put(
                    frame.call, PagesMissing(f"{self._limits.calls_max} calls of this frontend are open")
                )
            case frame:
                task = asyncio.create_task(self._run(frame), name=frame.request.request_id)
                self._calls[frame.call] = task
                if isinstance(frame, Prefetch):
                    self._prefetches.add(frame.call)
                task.add_done_callback(lambda task: self._ended(frame.call, task))

    async def _run(self, frame: Generate | Produce | Prefetch) -> None:
        async def notify(alone: bool) -> None:  # noqa: FBT001  the signature of Notify
            self._put(frame.call, Trial(alone))
            await self._flush()

        finished = False

        def emit(delta: Delta) -> None:
            nonlocal finished
            if self._waiting[frame.call] >= self._limits.items_max:
                raise PagesMissing("the frontend does not read: its pages are given up until it does")
            self._put(frame.call, delta)
            finished = delta.finish is not None

        try:
            if isinstance(frame, Prefetch):
                self._put(frame.call, await self._engine.prefetch(frame.request))
                return
            if isinstance(frame, Produce):
                self._put(frame.call, await self._engine.produce(frame.request, notify))
                return
            await self._engine.stream(frame.request, emit, notify)
            if not finished:
                raise WorkerGone("the engine ended a stream that was not finished")
        except (PagesMissing, WorkerGone, RequestError) as failure:
            self._put(frame.call, failure)
        except TidemillError as error:
            self._put(frame.call, WorkerGone(f"{type(error).__name__}: {error}"))

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        del self._calls[call]
        self._prefetches.discard(call)
        if not task.cancelled() and (error := task.exception()) is not None:
            request_id = task.get_name()
            log.error("request %s broke", request_id, exc_info=error, extra={"request_id": request_id})
            self._put(call, WorkerGone(f"the worker broke on this request: {type(error).__name__}"))

    def _put(self, call: int, body: Delta | Produced | Trial | Failure) -> None:
        self._outbox.append(wire_of(StreamItem(call, body)))
        self.sent.clear()
        self._waiting[call] += 1
        self._filled.set()

    async def _send_items(self) -> None:
        """Send one frame at a time. The calls that a step wakes run in one iteration of the event loop, and
        this runs after them, so the items of a step go out together."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(0)  # tokens come before these calls have run
            items = list(first_frame(self._outbox, self._limits.frame_items_max))
            del self._outbox[: len(items)]
            self._waiting = Counter(item.call for item in self._outbox)
            if not self._outbox:
                self._filled.clear()
            await self._send(encode(items))
            if not self._outbox:
                self.sent.set()
