"""Router, heartbeats and the client of the edge over loopback sockets, with an engine that only counts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from tests.support.cluster.heartbeats import heartbeat, placement_request, worker_info
from tests.support.cluster.scripted_engine import fails
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.waits import until
from tidemill.cluster.messages import FleetStatus, PlacementRequest
from tidemill.cluster.orders import Drain, SetBudget, SetRole
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import encode, encode_heartbeat
from tidemill.cluster.rpc.placement_codec import decode_placements, encode_placement_requests
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.worker.assignment import Assignment
from tidemill.cluster.worker.heartbeats import Heartbeats, UnsentAnnouncements
from tidemill.workers.messages import (
    Announcement,
    Poisonous,
    RequestError,
    Unserved,
    WorkerGone,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

pytestmark = IN_GRPC_LOOP

WAIT_S_MAX = 20.0
KEYS = (b"depth--1", b"depth--2")
INFO = worker_info(device="n/cpu", memory_bytes=1000, memory_floor_bytes=100, memory_max_bytes=2000)
REQUEST = placement_request(wait_s_max=WAIT_S_MAX)


@dataclass
class CountingEngine:
    """An engine that makes a step whenever `progress` is read, unless it is wedged."""

    wedged: bool = False
    rows: int = 0
    counted_steps: int = 0
    budgets: list[int] = field(default_factory=list[int])
    takes: list[tuple[bool, bool]] = field(default_factory=list[tuple[bool, bool]])
    announced: list[bool] = field(default_factory=list[bool])  # whether each announcement was full

    @property
    def progress(self) -> int:
        self.counted_steps += not self.wedged
        return self.counted_steps

    def load(self) -> WorkerLoad:
        budget_bytes = self.budgets[-1] if self.budgets else INFO.memory_floor_bytes
        return WorkerLoad(
            running_rows=self.rows,
            budget_bytes=budget_bytes - budget_bytes % 64,  # it rounds
            counters={"steps": float(self.counted_steps)},
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        self.announced.append(full)
        return Announcement(added=KEYS if full else (), full=full)

    def resize(self, budget_bytes: int) -> None:
        self.budgets.append(budget_bytes)

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self.takes.append((produces, generates))


@dataclass
class Cluster:
    """A router at the address that `find` returns."""

    router: Router
    service: RouterService
    address: str
    began: list[str]  # to report, by name
    away: bool = False

    async def find(self) -> str:
        if self.away:
            raise WorkerGone("the router is away")
        return self.address


@asynccontextmanager
async def cluster() -> AsyncGenerator[Cluster]:
    router = Router(asyncio.get_running_loop().time)
    began: list[str] = []
    service = RouterService(router, on_ready=began.append)
    try:
        yield Cluster(router, service, await service.start("127.0.0.1"), began)
    finally:
        await service.stop()


@asynccontextmanager
async def sending_heartbeats(
    running: Cluster, engine: CountingEngine, info: WorkerInfo = INFO
) -> AsyncGenerator[asyncio.Event]:
    """Send the heartbeats of an engine. The event is set by each answer."""
    answered = asyncio.Event()
    heartbeats = Heartbeats(engine, Assignment(engine, info), running.find, UnsentAnnouncements(engine))
    heartbeats.follow(answered.set)
    task = asyncio.create_task(heartbeats.run())
    try:
        yield answered
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def client(running: Cluster) -> AsyncGenerator[RouterClient]:
    client = RouterClient(running.find)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def scene() -> AsyncGenerator[tuple[Cluster, CountingEngine, asyncio.Event, RouterClient]]:
    """A router, a worker that has had an answer from it, and the client of an edge."""
    engine = CountingEngine()
    async with (
        cluster() as running,
        client(running) as router_client,
        sending_heartbeats(running, engine) as answered,
    ):
        await answered.wait()
        yield running, engine, answered, router_client


async def until_known(running: Cluster) -> None:
    """Wait until the router knows everything of its worker."""
    await until(
        lambda: [worker.restorable_depths for worker in running.router.status().workers] == [len(KEYS)]
    )


def open_report(channel: grpc.aio.Channel) -> Any:  # noqa: ANN401  half of gRPC's call types are unknown
    return cast("Any", channel).stream_stream("/tidemill.Router/Report")()


def call(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:  # noqa: ANN401  as above
    return cast("Any", channel).unary_unary(f"/tidemill.Router/{method}")(data)


async def test_first_heartbeats_announce_everything_and_let_requests_be_placed() -> None:
    """A worker that was reported lost comes back, and one whose report breaks is lost without a tick."""
    engine = CountingEngine(rows=3)
    async with cluster() as running, client(running) as router_client:
        placed = asyncio.create_task(router_client.place(REQUEST))  # waits for a worker
        async with sending_heartbeats(running, engine) as answered:
            await answered.wait()
            assert (await placed).decode == INFO.worker
            (worker,) = (await router_client.status()).workers
            assert worker.info == INFO
            assert worker.restorable_depths == len(KEYS)
            assert worker.load.running_rows == 3
            await until(lambda: len(engine.announced) >= 4)
            # The full one has the changes of the first, too.
            assert engine.announced[:4] == [False, True, False, False]
            await router_client.report_lost(INFO.worker)
            await until_known(running)
        await until(lambda: not running.router.status().workers)
        assert running.began == [INFO.name]


async def test_heartbeats_stop_with_a_wedged_step_loop_and_the_server_loses_the_worker() -> None:
    async with scene() as (running, engine, answered, _):
        engine.wedged = True
        engine.rows = 1  # a change to report
        num_announced = len(engine.announced)
        await asyncio.sleep(0)
        answered.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await answered.wait()
        assert len(engine.announced) <= num_announced + 1  # of the step before
        ticks = asyncio.create_task(running.service.run())
        await until(lambda: not running.router.status().workers)
        engine.wedged = False
        await until_known(running)
        ticks.cancel()


async def test_server_keeps_a_worker_when_its_old_report_ends_late() -> None:
    async with cluster() as running:
        async with open_channel(running.address) as old:
            stream = open_report(old)
            await stream.write(encode_heartbeat(heartbeat(INFO)))
            await stream.read()
            heartbeats = sending_heartbeats(running, CountingEngine())
            await (await heartbeats.__aenter__()).wait()
        await asyncio.sleep(0.1)
        assert len(running.router.status().workers) == 1
        await heartbeats.__aexit__(None, None, None)


async def test_client_raises_unserved_without_worker_and_without_router() -> None:
    async with cluster() as running, client(running) as router_client:
        request = replace(REQUEST, wait_s_max=0.1)
        assert "no decode worker" in await fails(router_client.place(request), Unserved)
        running.away = True
        await running.service.stop()
        assert "router" in await fails(router_client.place(request), Unserved)
        await router_client.report_lost(INFO.worker)  # fails silently without a router


@pytest.mark.parametrize("method", ["Place", "Lost"])
@pytest.mark.parametrize("data", [b"", b"\xff" * 9, encode({"field": "of a newer version"})])
async def test_server_refuses_malformed_requests(method: str, data: bytes) -> None:
    async with cluster() as running, open_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_engine_gets_the_budget_of_broker_and_operator() -> None:
    async with scene() as (_, engine, answered, router_client):
        await until(lambda: engine.budgets == [INFO.memory_bytes])  # it is the only worker of its device
        for _ in range(2):
            answered.clear()
            await answered.wait()
        await router_client.carry_out(SetBudget(INFO.name, 500))
        await until(lambda: engine.budgets == [INFO.memory_bytes, 500])
        (worker,) = (await router_client.status()).workers
        assert (worker.set_by, worker.set_bytes) == ("operator", 500)
        await router_client.carry_out(SetBudget(INFO.name, None))
        await until(lambda: engine.budgets == [INFO.memory_bytes, 500, INFO.memory_bytes])
        for name, budget, status, param, words in (
            ("decode-7", 500, 404, "worker", INFO.name),
            (INFO.name, 2001, 400, "budget", "2,000"),
        ):
            with pytest.raises(RequestError, match=words) as caught:
                await router_client.carry_out(SetBudget(name, budget))
            assert (caught.value.status, caught.value.param) == (status, param)


async def test_router_of_another_model_sets_the_budget_and_nothing_else() -> None:
    """Two models share a device, and the router of one broker serves both.

    It lends memory and takes budgets of operators. It places no request on the worker of the other model.
    """
    engine, lender = CountingEngine(), CountingEngine()
    other = replace(INFO, worker=WorkerId("lender-0.1"), name="lender-0", memory_floor_bytes=300)
    async with cluster() as lending, client(lending) as memory:
        own = Router(asyncio.get_running_loop().time, has_budgets=False)
        service = RouterService(own)
        address = await service.start("127.0.0.1")

        async def find() -> str:
            return address

        assignment = Assignment(engine, INFO)
        heartbeats = Heartbeats(engine, assignment, find, UnsentAnnouncements(engine))
        heartbeats.follow(lambda: None, budgets=False)
        borrowing = Heartbeats(engine, assignment, lending.find, None)
        tasks = [asyncio.create_task(sender.run()) for sender in (heartbeats, borrowing)]
        await until(lambda: engine.budgets[-1:] == [INFO.memory_bytes])
        async with sending_heartbeats(lending, lender, other):
            await until(lambda: lender.budgets[-1:] == [INFO.memory_bytes])
            await memory.carry_out(SetBudget(INFO.name, 1700))
            await until(lambda: (engine.budgets[-1:], lender.budgets[-1:]) == ([1700], [300]))
            assert (await memory.budgets())[INFO.name] == ("operator", 1700)
            (row,) = own.status().workers
            assert (row.set_by, own.budgets()) == ("broker", {})
            (row,) = FleetStatus(workers=(row,)).with_budgets(await memory.budgets()).workers
            assert (row.info, row.set_by, row.set_bytes) == (INFO, "operator", 1700)
            assert [row.info.name for row in lending.router.status().workers] == ["lender-0"]
            assert (await memory.place(REQUEST)).decode == other.worker
            lending.away = True
            await lending.service.stop()
            assert await memory.budgets() == {}
            assert FleetStatus(workers=(row,)).with_budgets({}).workers == (row,)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await service.stop()


async def test_server_refuses_heartbeats_of_another_worker() -> None:
    async with cluster() as running, open_channel(running.address) as channel:
        stream = open_report(channel)
        for info in (INFO, replace(INFO, worker=WorkerId("decode-1.1"), name="decode-1")):
            await stream.write(encode_heartbeat(heartbeat(info)))
        await stream.read()  # the answer to the first one
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not running.router.status().workers)


async def test_client_places_requests_with_the_second_router_when_the_first_is_lost() -> None:
    """The commands of the first router count alone, and fail while it is away."""
    engine = CountingEngine()
    async with cluster() as first, cluster() as second:
        unsent, assignment = UnsentAnnouncements(engine), Assignment(engine, INFO)
        senders = [Heartbeats(engine, assignment, running.find, unsent) for running in (first, second)]
        senders[0].follow(lambda: None)
        tasks = [asyncio.create_task(sender.run()) for sender in senders]
        router_client = RouterClient(first.find, second.find)
        assert (await router_client.place(REQUEST)).decode == INFO.worker
        await until(lambda: len(second.router.status().workers) == 1)
        second.router.carry_out(Drain(INFO.name, force=True))
        await router_client.carry_out(SetRole(INFO.name, "mixed"))
        await until(lambda: second.router.status().workers[0].info.role == "mixed")
        assert engine.takes == [(True, True)], "the second router has no say"
        second.router.carry_out(Drain(INFO.name, drain=False, force=True))
        await first.service.stop()
        first.away = True
        assert (await router_client.place(REQUEST)).decode == INFO.worker
        with pytest.raises(Unserved):
            await router_client.carry_out(Drain(INFO.name))
        await router_client.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_orders_of_a_supervisor_that_was_replaced_are_refused() -> None:
    """Operators have no number, and a router that starts takes that of the journal."""
    async with cluster() as running, open_channel(running.address) as channel:
        stream = open_report(channel)
        await stream.write(encode_heartbeat(heartbeat(INFO)))
        await stream.read()
        running.service.fence(7)
        old, new, operator = (
            RouterClient(running.find, fence=lambda number=number: number) for number in (6, 7, 0)
        )
        with pytest.raises(Unserved, match="the supervisor 6 was replaced by 7"):
            await old.carry_out(Drain(INFO.name, force=True))
        with pytest.raises(Unserved, match="was replaced"):
            await old.carry_out(SetRole(INFO.name, "mixed"))
        for allowed in (new, operator):
            await allowed.carry_out(Drain(INFO.name, force=True))
        newer = RouterClient(running.find, fence=lambda: 9)
        await newer.carry_out(SetRole(INFO.name, "mixed"))
        with pytest.raises(Unserved, match="the supervisor 7 was replaced by 9"):
            await new.carry_out(Drain(INFO.name, drain=False))
        for client in (old, new, operator, newer):
            await client.close()


async def test_router_places_the_requests_of_a_frame_in_order() -> None:
    """A request that cannot be placed has its own error, and none waits for a worker."""
    async with cluster() as running, open_channel(running.address) as channel:

        async def place_all(*requests: PlacementRequest) -> list[Any]:
            return decode_placements(await call(channel, "PlaceAll", encode_placement_requests(requests)))

        assert [type(answer) for answer in await place_all(REQUEST, REQUEST)] == [Unserved, Unserved]
        running.router.heartbeat(heartbeat(INFO))
        routes = await place_all(REQUEST, replace(REQUEST, keys=(b"depth--1",)))
        assert [route.decode for route in routes] == [INFO.worker] * 2
        running.router.report_lost(WorkerId("other"), b"bad")
        poisonous, route = await place_all(replace(REQUEST, content_hash=b"bad"), REQUEST)
        assert isinstance(poisonous, Poisonous)
        assert route.decode == INFO.worker
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(channel, "PlaceAll", b"nonsense")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
