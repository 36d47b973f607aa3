"""The edge's client of the routers, each of which may restart under another address at any time."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tidemill.cluster.messages import (
    FleetStatus,
    MemberOrder,
    MembersAnswer,
    Misses,
    PlacementRequest,
    RoleScale,
    Route,
    SetBudget,
)
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import cancellable, open_channel
from tidemill.cluster.rpc.codec import (
    BudgetCommand,
    DrainCommand,
    EdgeReport,
    LossReport,
    Malformed,
    MembersReply,
    RoleCommand,
    ScaleAnswer,
    ScaleCommand,
    decode,
    encode,
)
from tidemill.cluster.rpc.placement_codec import (
    decode_placement,
    decode_placements,
    encode_placement_request,
    encode_placement_requests,
)
from tidemill.workers.messages import (
    Overloaded,
    Poisonous,
    RequestError,
    Role,
    Unserved,
    WorkerGone,
    WorkerId,
)

if TYPE_CHECKING:  # generic only in the type stubs
    UnaryMethod = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

Placement = Route | Overloaded | Poisonous | Unserved

FindRouter = Callable[[], Awaitable[str]]
"""Returns the current address of the router. Raises WorkerGone while it is away."""


def at(address: str) -> FindRouter:
    """Return a function for a router that always has this address."""

    async def find() -> str:
        return address

    return find


STATUS_WAIT_S_MAX = 5.0
ORDER_WAIT_S_MAX = 5.0
OUT_WAIT_S_MAX = 0.5
BUDGETS_WAIT_S_MAX = 0.5
LOST_WAIT_S_MAX = 1.0
SUPERVISOR_WAIT_S_MAX = 10.0
"""Longer than a router waits for the supervisor."""

FRAME_REQUESTS_MAX = 64
FRAME_KEYS_MAX = 1 << 19
"""The limits of a frame of placements: 4 MiB of keys, but at least one request."""

RETRY_S = 0.1
RETURN_S = 5.0
"""The period of the questions to an earlier router than the current one. When it has answered two of them, it
has a heartbeat of every worker."""

ANSWER_S_MAX = 1.0
"""The time that an answer may take beyond the time that the router was asked to wait."""


class RouterClient:
    """The `RequestRouter` of cluster/edge/flow.py, over gRPC. It belongs to one asyncio loop. Requests that
    any of several routers can answer go to one until it is away, then to the next; all clients return to the
    first when it is back, because each router knows its own placements earlier than those of the others
    (decision 45). Operators' commands go to the first.

    A request has a call of its own if no other waits for a placement. The others go in frames, each of which
    leaves when the one before it is answered, with all requests since then.
    """

    def __init__(
        self,
        *routers: FindRouter,
        tls: MutualTls | None = None,
        fence: Callable[[], int] = lambda: 0,
    ) -> None:
        """`fence` returns the number of the supervisor that uses this client; 0: not a supervisor."""
        self._fence = fence
        self._links = [_RouterConnection(find, tls) for find in routers]
        self._at = 0  # the index of the current router
        self._unsent = deque[tuple[PlacementRequest, asyncio.Future[Placement | None]]]()
        self._frames: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None
        self._num_own = 0  # requests with a call of their own

    async def place(self, request: PlacementRequest) -> Route:
        """Place a request. Wait up to `request.wait_s_max` for the router and for a worker. Raises Unserved,
        Overloaded, Poisonous."""
        now_s = asyncio.get_running_loop().time
        give_up_s = now_s() + request.wait_s_max

        def left_s() -> float:
            return max(0.0, give_up_s - now_s())

        def asking() -> bytes:
            return encode_placement_request(replace(request, wait_s_max=left_s()))

        placed: Placement | None = None
        if self._num_own or self._frames is not None:
            try:
                async with asyncio.timeout(request.wait_s_max + ANSWER_S_MAX):
                    placed = await self._place_in_frame(request)
            except TimeoutError:
                raise _unanswered(request.wait_s_max, "it does not answer") from None
        if not isinstance(placed, Route | Overloaded | Poisonous):  # only a call of its own waits
            self._num_own += 1
            try:
                placed = decode_placement(await self._call("Place", asking, left_s()))
            finally:
                self._num_own -= 1
        if isinstance(placed, Route):
            return placed
        raise placed

    async def _place_in_frame(self, request: PlacementRequest) -> Placement | None:
        """Return the answer of the current router; None if it has none."""
        answer = asyncio.get_running_loop().create_future()
        self._unsent.append((request, answer))
        if self._frames is None:
            self._frames = asyncio.create_task(self._send_frames())
        return await answer

    async def _send_frames(self) -> None:
        """Send frames until all requests are answered."""
        try:
            while frame := self._next_frame():
                placed: list[Placement] | list[None] = [None] * len(frame)
                with suppress(WorkerGone, Unserved, RequestError, Malformed):
                    data = encode_placement_requests([request for request, _ in frame])
                    placed = decode_placements(await self._ask(self._at, "PlaceAll", data))
                for (_, answer), each in zip(frame, placed, strict=True):
                    if not answer.done():
                        answer.set_result(each)
        finally:
            self._frames = None

    def _next_frame(self) -> list[tuple[PlacementRequest, "asyncio.Future[Placement | None]"]]:
        frame: list[tuple[PlacementRequest, asyncio.Future[Placement | None]]] = []
        num_keys = 0
        while self._unsent and len(frame) < FRAME_REQUESTS_MAX:
            request, answer = self._unsent[0]
            num_keys += len(request.keys)
            if frame and num_keys > FRAME_KEYS_MAX:
                break
            self._unsent.popleft()
            if not answer.done():  # its client has not left
                frame.append((request, answer))
        return frame

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        """Report to the router that a worker is gone, and the content that crashed it, if known. The router
        notices it by itself when the report does not arrive."""
        with suppress(Unserved):
            await self._call("Lost", lambda: encode(LossReport(worker, blamed)), LOST_WAIT_S_MAX)

    async def silent_workers(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Return which of these workers have sent the router no heartbeat for too long; none if it does not
        answer."""
        with suppress(Unserved, Malformed):
            body = encode(list(workers))
            return decode(frozenset[WorkerId], await self._call("Out", lambda: body, OUT_WAIT_S_MAX))
        return frozenset()

    async def status(self) -> FleetStatus:
        """Return the status of the fleet. Raises Unserved when no router answers."""
        return decode(FleetStatus, await self._call("Status", lambda: b"", STATUS_WAIT_S_MAX, first=True))

    async def budgets(self) -> dict[str, SetBudget]:
        """Return the budget that the first router has set, by the worker's name; empty if it does not
        answer."""
        with suppress(Unserved, Malformed):
            data = await self._call("Budgets", lambda: b"", BUDGETS_WAIT_S_MAX, first=True)
            return decode(dict[str, SetBudget], data)
        return {}

    async def set_budget(self, worker: str, budget_bytes: int | None) -> None:
        """Set the budget of a worker; None leaves it to the memory broker. Raises RequestError, with the
        possible range or the names of the workers, and Unserved."""
        order = encode(BudgetCommand(worker, budget_bytes))
        await self._call("SetBudget", lambda: order, ORDER_WAIT_S_MAX, first=True)

    async def drain(self, worker: str, *, drain: bool, force: bool = False) -> None:
        """Order a worker to hand over its work, or to take work again. Raises RequestError, Unserved."""
        order = encode(DrainCommand(worker, drain, force, self._fence()))
        await self._call("Drain", lambda: order, ORDER_WAIT_S_MAX, first=True)

    async def set_role(self, worker: str, role: Role) -> None:
        """Give a worker another role. Raises RequestError, Unserved."""
        order = encode(RoleCommand(worker, role, self._fence()))
        await self._call("SetRole", lambda: order, ORDER_WAIT_S_MAX, first=True)

    async def scale(self, counts: Mapping[Role, int], *, pending: bool) -> str | None:
        """See Service.scale."""
        order = encode(ScaleCommand(dict(counts), pending))
        answer = decode(ScaleAnswer, await self._call("Scale", lambda: order, SUPERVISOR_WAIT_S_MAX))
        _raise_refused(answer.refusal)
        return answer.lacks

    async def roles(self) -> tuple[RoleScale, ...]:
        """See Service.roles."""
        return decode(tuple[RoleScale, ...], await self._call("Roles", lambda: b"", SUPERVISOR_WAIT_S_MAX))

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int = 0) -> int:
        """Report what the edge of this id has answered and refused since its last report, the number of
        resets of the prefix cache that it knows, and its open requests. Return the present number of resets.
        Raises Unserved."""
        report = encode(EdgeReport(edge, misses, resets, open_requests))
        return decode(int, await self._call("Missed", lambda: report, SUPERVISOR_WAIT_S_MAX))

    async def reset(self, edge: str) -> int:
        """Reset the prefix cache, and return the number of resets when all other edges know it. Raises
        Unserved."""
        return decode(int, await self._call("Reset", lambda: encode(edge), SUPERVISOR_WAIT_S_MAX))

    async def members(self, order: MemberOrder) -> MembersAnswer:
        """See Service.members."""
        data = encode(order)
        reply = decode(MembersReply, await self._call("Members", lambda: data, SUPERVISOR_WAIT_S_MAX))
        _raise_refused(reply.refusal)
        assert reply.answer is not None, "a reply has an answer or a refusal"
        return reply.answer

    async def close(self) -> None:
        for task in filter(None, (self._frames, self._returning)):
            task.cancel()
        for way in self._links:
            await way.close()

    async def _call(
        self, name: str, data: Callable[[], bytes], wait_s_max: float, *, first: bool = False
    ) -> bytes:
        """Call until there is an answer or the time is up; `data` builds the body of each attempt."""
        reason = "it does not answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s_max + ANSWER_S_MAX):
                while True:
                    try:
                        return await self._ask(0 if first else self._at, name, data())
                    except WorkerGone as error:
                        reason = str(error)
                    await asyncio.sleep(RETRY_S)
        raise _unanswered(wait_s_max, reason)

    async def _ask(self, at: int, name: str, data: bytes) -> bytes:
        """Call one router. Raises what it refuses, and WorkerGone if it is away; then the next is current."""
        try:
            return await self._links[at].call(name, data)
        except grpc.aio.AioRpcError as error:
            _raise_refusal(error)
            reason = error.details() or error.code().name
        except (WorkerGone, Malformed, OSError) as error:
            reason = str(error)
        if at == self._at:  # no concurrent call has moved on
            self._at = (at + 1) % len(self._links)
            if self._at and self._returning is None:
                self._returning = asyncio.create_task(self._return())
        raise WorkerGone(reason)

    async def _return(self) -> None:
        """Make the first router that answers twice in turn the current one, until it is the first of all."""
        try:
            answered = list[int]()
            while self._at:
                await asyncio.sleep(RETURN_S)
                before, answered = answered, [at for at in range(self._at) if await self._answers(at)]
                self._at = min({*before} & {*answered}, default=self._at)
        finally:
            self._returning = None

    async def _answers(self, at: int) -> bool:
        with suppress(grpc.aio.AioRpcError, WorkerGone, OSError, TimeoutError):
            async with asyncio.timeout(OUT_WAIT_S_MAX):
                await self._links[at].call("Out", encode([]))
                return True
        return False


def _unanswered(wait_s_max: float, reason: str) -> Unserved:
    return Unserved(f"no answer from the router within {wait_s_max:g} s: {reason}")


class _RouterConnection:
    """The connection to one router."""

    def __init__(self, find: FindRouter, tls: MutualTls | None) -> None:
        self._find = find
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._calls: Counter[grpc.aio.Channel] = Counter()  # in progress
        self._finding = asyncio.Lock()  # thousands may wait for a router that restarts

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _open(self) -> grpc.aio.Channel:
        async with self._finding:
            if self._channel is None:
                self._channel = open_channel(await self._find(), self._tls)
            return self._channel

    async def call(self, name: str, data: bytes) -> bytes:
        channel = await self._open()
        method: UnaryMethod = channel.unary_unary(f"/tidemill.Router/{name}")
        self._calls[channel] += 1
        try:
            with cancellable():
                return await method(data)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._channel is channel:
                self._channel = None
            raise
        finally:
            self._calls[channel] -= 1
            if self._channel is not channel and not self._calls[channel]:  # closing it cancels its calls
                del self._calls[channel]
                await channel.close()


def _raise_refused(refusal: tuple[str, str | None, int, str | None] | None) -> None:
    """Raise the RequestError of these parts, if the supervisor has refused an order."""
    if refusal is not None:
        message, param, status, code = refusal
        raise RequestError(message, param=param, status=status, code=code)


def _raise_refusal(error: grpc.aio.AioRpcError) -> None:
    """Raise an error that the router means permanently: a retry would get the same."""
    details = error.details() or "the router refuses"
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNAUTHENTICATED:
            raise Unserved(details) from None
        case grpc.StatusCode.PERMISSION_DENIED:
            raise RequestError(details, status=403) from None
        case grpc.StatusCode.NOT_FOUND:
            raise RequestError(details, param="worker", status=404) from None
        case grpc.StatusCode.FAILED_PRECONDITION:
            raise RequestError(details, param="worker", status=409, code="last_of_its_kind") from None
        case grpc.StatusCode.OUT_OF_RANGE:
            raise RequestError(details, param="budget") from None
        case _:
            pass
