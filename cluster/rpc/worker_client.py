"""The edge's side of the data plane: one stream to each worker, shared by all requests that run there."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Collection, Generator
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING

import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import FRAME_BYTES_MAX, cancellable, connection_broke, open_channel
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
    encode_client_frame,
    item_of,
    wire_items,
)
from tidemill.workers.inbox import Emit, Inbox, Pause, done
from tidemill.workers.messages import (
    CrashedAlone,
    Delta,
    LostAlone,
    PagesMissing,
    Produced,
    Request,
    RequestError,
    WorkerGone,
    WorkerId,
)

if TYPE_CHECKING:  # generic only in the type stubs
    StreamMethod = grpc.aio.StreamStreamMultiCallable[bytes, bytes]

Item = Delta | Produced | Trial | Failure

UNREAD_ITEMS_MAX = 1024
"""The number of items that a reader may be behind. Beyond it its call is cancelled, and placed again when it
continues to read."""

SILENCE_S_MAX = 1.0
"""The time after which the router is asked about a silent worker that owes answers."""

LIVES_S_MAX = 2.0
"""The time limit for an answer on new connections, after one broke."""

LIVES_PAUSE_S = 0.05
"""The pause between two of them."""

REFUSED = "Connection refused"
"""The text of gRPC for a host where nothing listens at the address."""

PING_TIMEOUT = "ping timeout"
"""The text of gRPC for a peer that does not answer pings, in contrast to one that has closed the
connection."""


class WorkerClients:
    """The workers over gRPC: the `WorkerStreams` of cluster/edge/flow.py. It belongs to one asyncio loop."""

    def __init__(self, unread_items_max: int = UNREAD_ITEMS_MAX, tls: MutualTls | None = None) -> None:
        self._unread_items_max = unread_items_max
        self._tls = tls
        self._streams: dict[tuple[WorkerId, str], _Stream] = {}

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        """Compute and store the prompt. Raises PagesMissing, WorkerGone, HandedOver, CrashedAlone, LostAlone,
        RequestError."""
        return await self._produced(worker, address, Produce, request)

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        """Return when the worker has fetched all that it can. Cancelling ends it there, before any later
        call. Raises as `produce` does."""
        await self._produced(worker, address, Prefetch, request)

    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None:
        """Emit the answer. Cancelling this cancels the request on the worker. Raises as `produce` does."""

        def take(item: Item) -> Pause | None:
            match item:
                case Delta(finish=finish):
                    pause = emit(item)
                    return pause if finish is None else done
                case Produced():
                    raise WorkerGone(f"{worker} produces instead of generating")
                case Trial():
                    return None
                case failure:
                    raise failure

        stream = self._stream(worker, address)
        with stream.call(Generate(stream.new_call(), request)) as inbox:
            await inbox.read(take)

    def release(self, worker: WorkerId, address: str, tenant: str, name: str) -> None:
        """Let the worker drop what `tenant` retains there under `name`. Nothing answers."""
        self._stream(worker, address).send(Cancel(0, tenant, name))

    async def _produced(
        self, worker: WorkerId, address: str, kind: type[Produce | Prefetch], request: Request
    ) -> Produced:
        answers: list[Produced] = []

        def take(item: Item) -> Pause | None:
            match item:
                case Produced():
                    answers.append(item)
                    return done
                case Delta():
                    raise WorkerGone(f"{worker} generates instead of producing")
                case Trial():
                    return None
                case failure:
                    raise failure

        stream = self._stream(worker, address)
        with stream.call(kind(stream.new_call(), request)) as inbox:
            await inbox.read(take)
        return answers[0]

    def silent(self) -> frozenset[WorkerId]:
        """Return the workers that owe answers and have sent nothing for SILENCE_S_MAX."""
        return frozenset(worker for (worker, _), stream in self._streams.items() if stream.is_silent)

    def give_up(self, workers: Collection[WorkerId]) -> None:
        """Break the streams to these workers. One that still runs sees its end, and cancels its calls."""
        for (worker, _), stream in list(self._streams.items()):
            if worker in workers:
                stream.give_up("its heartbeats stopped")

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    def _stream(self, worker: WorkerId, address: str) -> "_Stream":
        key = (worker, address)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(worker, address, self._unread_items_max, self._tls)
            stream.reader.add_done_callback(lambda _: self._forget(key, stream))
        return stream

    def _forget(self, key: tuple[WorkerId, str], stream: "_Stream") -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]


class _Stream:
    """One connection to one incarnation of a worker. Once broken it stays so, and every call on it fails
    immediately."""

    def __init__(self, worker: WorkerId, address: str, unread_items_max: int, tls: MutualTls | None) -> None:
        self.broken = ""  # the reason
        self._last_frame_s = asyncio.get_running_loop().time()
        self._worker = worker
        self._address = address
        self._unread_items_max = unread_items_max
        self._tls = tls
        self._numbers = count(1)
        self._reason = "the connection was closed"  # the reason if it breaks
        self._died = True  # ... as far as is known
        self._is_cut = False  # only the connection broke
        self._inboxes: dict[int, Inbox[Item]] = {}
        self._alone: set[int] = set()  # calls on trial that run alone on the worker
        self._frames = asyncio.Queue[bytes | None]()  # None ends it
        self._frames.put_nowait(encode_client_frame(Hello(worker)))
        self.reader = asyncio.create_task(self._read())

    @property
    def is_silent(self) -> bool:
        since_s = asyncio.get_running_loop().time() - self._last_frame_s
        return bool(self._inboxes) and since_s > SILENCE_S_MAX

    def give_up(self, reason: str) -> None:
        self._reason, self._died = reason, False
        self.reader.cancel()

    def new_call(self) -> int:
        return next(self._numbers)

    def send(self, frame: Cancel) -> None:
        if not self.broken:
            self._frames.put_nowait(encode_client_frame(frame))

    @contextmanager
    def call(self, frame: Generate | Produce | Prefetch) -> Generator[Inbox[Item]]:
        """Send `frame`. In the block, the inbox receives the worker's items for it. Leaving early cancels the
        call."""
        data = encode_client_frame(frame)
        if len(data) > FRAME_BYTES_MAX:
            raise RequestError(
                f"the request takes {len(data)} bytes, more than {FRAME_BYTES_MAX}", param="prompt"
            )
        if self.broken:
            raise self._gone()
        if not self._inboxes:  # it owes nothing yet
            self._last_frame_s = asyncio.get_running_loop().time()
        inbox = self._inboxes[frame.call] = Inbox[Item]()
        self._frames.put_nowait(data)
        try:
            yield inbox
        finally:
            self._cancel(frame.call)

    async def close(self) -> None:
        self.reader.cancel()
        await asyncio.wait([self.reader])

    def _cancel(self, call: int) -> None:
        self._alone.discard(call)
        if self._inboxes.pop(call, None) is not None:
            self.send(Cancel(call))

    async def _sent(self) -> AsyncIterator[bytes]:
        while (frame := await self._frames.get()) is not None:
            yield frame

    async def _read(self) -> None:
        try:
            async with open_channel(self._address, self._tls) as channel:
                async for data in self._open(channel, self._sent()):
                    self._last_frame_s = asyncio.get_running_loop().time()
                    for wire in wire_items(data):
                        inbox = self._inboxes.get(wire.call)
                        if inbox is not None:  # else it was cancelled while this was on its way
                            self._deliver(item_of(wire), inbox)
        except grpc.aio.AioRpcError as error:
            self._reason = error.details() or error.code().name
            self._died = PING_TIMEOUT not in self._reason
            if self._died and connection_broke(error):
                self._is_cut = await self._still_runs()
        except (Malformed, OSError) as error:
            self._reason = str(error)
        finally:
            self._break(self._reason)

    async def _still_runs(self) -> bool:
        """Return whether the same incarnation still runs. Then only the connection broke, and no request has
        crashed the worker. The host of a killed process refuses immediately, and another incarnation refuses
        the name. A connection that breaks as well only means that the line is bad: another one is opened."""

        async def hello() -> AsyncIterator[bytes]:
            yield encode_client_frame(Hello(self._worker))

        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LIVES_S_MAX):
                while True:
                    try:
                        with cancellable():
                            async with open_channel(self._address, self._tls) as channel:
                                async for _ in self._open(channel, hello()):
                                    pass
                    except grpc.aio.AioRpcError as error:
                        is_refused = REFUSED in (error.details() or "")
                        if is_refused or not connection_broke(error):
                            return False
                    else:
                        return True
                    await asyncio.sleep(LIVES_PAUSE_S)
        return False

    def _open(self, channel: grpc.aio.Channel, frames: AsyncIterator[bytes]) -> AsyncIterable[bytes]:
        method: StreamMethod = channel.stream_stream("/tidemill.Worker/Stream")
        return method(frames)

    def _deliver(self, item: StreamItem, inbox: Inbox[Item]) -> None:
        if len(inbox) >= self._unread_items_max:
            inbox.put(PagesMissing("the stream is not read: its pages are given up until it is"))
            self._cancel(item.call)
            return
        inbox.put(item.body)
        if isinstance(item.body, Trial) and item.body.alone:
            self._alone.add(item.call)
        elif isinstance(item.body, Trial) or item.last:
            self._alone.discard(item.call)
        if item.last:
            del self._inboxes[item.call]

    def _break(self, reason: str) -> None:
        self.broken = reason
        self._frames.put_nowait(None)
        alone = CrashedAlone if self._died else LostAlone
        for call, inbox in self._inboxes.items():
            inbox.put(self._gone(alone if call in self._alone else WorkerGone))
        self._inboxes.clear()

    def _gone(self, kind: type[WorkerGone] = WorkerGone) -> WorkerGone | PagesMissing:
        """Return the error. A caller that lost only the connection retries on the same worker, which has all
        its pages."""
        if self._is_cut:
            return PagesMissing(f"the connection to {self._worker} broke, and it still runs: {self.broken}")
        return kind(f"{self._worker} at {self._address}: {self.broken}")
