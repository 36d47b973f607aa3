"""Router, heartbeats and the frontend's client over loopback sockets, with an engine that only counts."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from tests.support import grpc_loop
from tidemill.cluster.messages import FleetStatus, PlacementRequest
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import encode_heartbeat
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.worker.assignment import Assignment
from tidemill.cluster.worker.heartbeats import Heartbeats, UnsentAnnouncements
from tidemill.workers.messages import (
    Announcement,
    Heartbeat,
    RequestError,
    Unserved,
    WorkerGone,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

WAIT_S_MAX = 20.0
KEYS = (b"depth--1", b"depth--2")
INFO = WorkerInfo(
    worker=WorkerId("decode-0.1"),
    name="decode-0",
    role="decode",
    address="127.0.0.1:1",
    pid=1,
    node="n",
    page_tokens=64,
    device="n/cpu",
    memory_bytes=1000,
    memory_floor_bytes=100,
    memory_max_bytes=2000,
)
ASK = PlacementRequest(request_id="r", keys=(), num_tokens=10, max_new_tokens=1, wait_s_max=WAIT_S_MAX)


@dataclass
class CountingEngine:
    """Its loop turns once at every look, unless it is wedged."""

    wedged: bool = False
    rows: int = 0
    turns: int = 0
    budgets: list[int] = field(default_factory=list[int])
    takes: list[tuple[bool, bool]] = field(default_factory=list[tuple[bool, bool]])
    announced: list[bool] = field(default_factory=list[bool])  # whether each announcement was a full one

    @property
    def steps(self) -> int:
        self.turns += not self.wedged
        return self.turns

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running_rows=self.rows,
            budget_bytes=self.budgets[-1] if self.budgets else INFO.memory_floor_bytes,
            counters={"steps": float(self.turns)},
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        self.announced.append(full)
        return Announcement(added=KEYS if full else (), full=full)

    def resize(self, budget_bytes: int) -> None:
        self.budgets.append(budget_bytes)

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self.takes.append((produces, generates))


@dataclass
class Here:
    """A router that may move, and everything that finds it through `find`."""

    router: Router
    service: RouterService
    address: str
    away: bool = False

    async def find(self) -> str:
        if self.away:
            raise WorkerGone("the router is away")
        return self.address

    async def restart(self) -> None:
        await self.service.stop()
        fresh = await started()
        self.router, self.service, self.address = fresh.router, fresh.service, fresh.address


async def started() -> Here:
    router = Router(asyncio.get_running_loop().time)
    service = RouterService(router)
    return Here(router, service, await service.start("127.0.0.1"))


@asynccontextmanager
async def cluster() -> AsyncGenerator[Here]:
    here = await started()
    try:
        yield here
    finally:
        await here.service.stop()


@asynccontextmanager
async def beating(
    here: Here, engine: CountingEngine, info: WorkerInfo = INFO
) -> AsyncGenerator[asyncio.Event]:
    heard = asyncio.Event()
    beats = Heartbeats(engine, Assignment(engine, info), here.find, UnsentAnnouncements(engine))
    beats.obey(heard.set)
    task = asyncio.create_task(beats.run())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def client(here: Here) -> AsyncGenerator[RouterClient]:
    client = RouterClient(here.find)
    try:
        yield client
    finally:
        await client.close()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    grpc_loop.run(coroutine, 3 * WAIT_S_MAX)


def report_to(channel: grpc.aio.Channel) -> Any:  # noqa: ANN401 - half of gRPC's call types are unknown
    return cast("Any", channel).stream_stream("/tidemill.Router/Report")()


def ask(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:  # noqa: ANN401 - as above
    return cast("Any", channel).unary_unary(f"/tidemill.Router/{method}")(data)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not holds():  # noqa: ASYNC110 - what changes it is behind a socket
            await asyncio.sleep(0.01)


async def fails(awaitable: Awaitable[object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        await awaitable
    return str(caught.value)


def test_the_first_beat_says_everything_and_requests_find_the_worker() -> None:
    async def main() -> None:
        engine = CountingEngine(rows=3)
        async with cluster() as here, client(here) as frontend:
            placed = asyncio.create_task(frontend.place(ASK))  # waits for a worker
            async with beating(here, engine) as heard:
                await heard.wait()
                assert (await placed).decode == INFO.worker
                (worker,) = (await frontend.status()).workers
                assert worker.info == INFO
                assert worker.restorable_depths == len(KEYS)
                assert worker.load.running_rows == 3
                await until(lambda: len(engine.announced) >= 4)
                assert engine.announced[:4] == [False, True, False, False]  # the news that everything holds

    run(main())


def test_a_wedged_step_loop_does_not_beat() -> None:
    async def main() -> None:
        engine = CountingEngine()
        async with cluster() as here, beating(here, engine) as heard:
            await heard.wait()
            engine.wedged = True
            engine.rows = 1  # even though there is something to say
            beats = len(engine.announced)
            await asyncio.sleep(0)
            heard.clear()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await heard.wait()
            assert len(engine.announced) <= beats + 1  # the turn before
            engine.wedged = False
            await heard.wait()

    run(main())


def test_a_worker_whose_report_breaks_off_is_lost_at_once() -> None:
    async def main() -> None:
        async with cluster() as here:
            async with beating(here, CountingEngine()) as heard:
                await heard.wait()
            await until(lambda: not here.router.status().workers)  # and nobody calls tick

    run(main())


def test_a_silent_worker_is_lost_at_the_tick() -> None:
    async def main() -> None:
        engine = CountingEngine()
        async with cluster() as here, beating(here, engine) as heard:
            ticks = asyncio.create_task(here.service.run())
            await heard.wait()
            engine.wedged = True
            await until(lambda: not here.router.status().workers)
            engine.wedged = False
            await until(
                lambda: [worker.restorable_depths for worker in here.router.status().workers] == [len(KEYS)]
            )
            ticks.cancel()

    run(main())


def test_a_worker_that_was_called_lost_comes_back_with_everything() -> None:
    async def main() -> None:
        async with cluster() as here, client(here) as frontend, beating(here, CountingEngine()) as heard:
            await heard.wait()
            await frontend.report_lost(INFO.worker)
            await until(
                lambda: [worker.restorable_depths for worker in here.router.status().workers] == [len(KEYS)]
            )

    run(main())


def test_a_restarted_router_is_found_and_told_everything() -> None:
    async def main() -> None:
        async with cluster() as here, client(here) as frontend, beating(here, CountingEngine()) as heard:
            await heard.wait()
            assert (await frontend.place(ASK)).decode == INFO.worker
            here.away = True
            await here.restart()
            placed = asyncio.create_task(frontend.place(ASK))
            await asyncio.sleep(0.2)
            here.away = False
            assert (await placed).decode == INFO.worker
            (worker,) = (await frontend.status()).workers
            assert worker.restorable_depths == len(KEYS)

    run(main())


def test_an_old_report_that_ends_late_does_not_lose_the_worker() -> None:
    async def main() -> None:
        async with cluster() as here:
            async with open_channel(here.address) as old:
                stream = report_to(old)
                beat = Heartbeat(
                    info=INFO, sequence=1, load=WorkerLoad(), announcement=Announcement(full=True)
                )
                await stream.write(encode_heartbeat(beat))
                await stream.read()
                heartbeats = beating(here, CountingEngine())
                await (await heartbeats.__aenter__()).wait()
            await asyncio.sleep(0.1)
            assert len(here.router.status().workers) == 1
            await heartbeats.__aexit__(None, None, None)

    run(main())


def test_no_worker_and_no_router_are_unserved() -> None:
    async def main() -> None:
        async with cluster() as here, client(here) as frontend:
            ask = replace(ASK, wait_s_max=0.1)
            assert "no decode worker" in await fails(frontend.place(ask), Unserved)
            here.away = True
            await here.service.stop()
            assert "router" in await fails(frontend.place(ask), Unserved)
            await frontend.report_lost(INFO.worker)  # nobody to tell, nothing to fail

    run(main())


def test_a_frontend_that_gives_up_waits_no_more() -> None:
    async def main() -> None:
        async with cluster() as here, client(here) as frontend:
            before = asyncio.all_tasks()
            placed = asyncio.create_task(frontend.place(ASK))
            await asyncio.sleep(0.1)
            placed.cancel()
            await asyncio.wait([placed])
            await until(lambda: len(asyncio.all_tasks()) <= len(before))

    run(main())


@pytest.mark.parametrize("method", ["Place", "Lost"])
@pytest.mark.parametrize("data", [b"\xff" * 9, b"\x12\x03abc"])
def test_malformed_questions_are_refused(method: str, data: bytes) -> None:
    async def main() -> None:
        async with cluster() as here, open_channel(here.address) as channel:
            call = ask(channel, method, data)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main())


def test_an_engine_gets_the_budget_that_the_router_and_people_find_right() -> None:
    async def main() -> None:
        engine = CountingEngine()
        async with cluster() as here, client(here) as frontend, beating(here, engine) as heard:
            await heard.wait()
            await until(lambda: engine.budgets == [INFO.memory_bytes])  # it is alone on its device
            await frontend.set_budget(INFO.name, 500)
            await until(lambda: engine.budgets == [INFO.memory_bytes, 500])
            (worker,) = (await frontend.status()).workers
            assert (worker.set_by, worker.set_bytes) == ("operator", 500)
            heard.clear()
            await heard.wait()
            await frontend.set_budget(INFO.name, None)
            await until(lambda: engine.budgets == [INFO.memory_bytes, 500, INFO.memory_bytes])

    run(main())


def test_another_models_router_says_the_budget_and_nothing_else() -> None:
    """Two models on one device: the router of one hears the memory of both. It lends, it takes orders about
    budgets, and it places no request on the other model's worker."""

    async def main() -> None:
        engine, lender = CountingEngine(), CountingEngine()
        other = replace(INFO, worker=WorkerId("lender-0.1"), name="lender-0", memory_floor_bytes=300)
        async with cluster() as there, client(there) as memory:
            own = Router(asyncio.get_running_loop().time, has_budgets=False)
            service = RouterService(own)
            address = await service.start("127.0.0.1")

            async def find() -> str:
                return address

            news, duties = UnsentAnnouncements(engine), Assignment(engine, INFO)
            beats = Heartbeats(engine, duties, find, news)
            beats.obey(lambda: None, budgets=False)
            borrows = Heartbeats(engine, duties, there.find, None)
            tasks = [asyncio.create_task(beat.run()) for beat in (beats, borrows)]
            await until(lambda: engine.budgets[-1:] == [INFO.memory_bytes])
            async with beating(there, lender, other):
                await until(lambda: lender.budgets[-1:] == [INFO.memory_bytes])
                await memory.set_budget(INFO.name, 1700)
                await until(lambda: (engine.budgets[-1:], lender.budgets[-1:]) == ([1700], [300]))
                assert (await memory.budgets())[INFO.name] == ("operator", 1700)
                (row,) = own.status().workers
                assert (row.set_by, own.budgets()) == ("broker", {})
                (row,) = FleetStatus(workers=(row,)).with_budgets(await memory.budgets()).workers
                assert (row.info, row.set_by, row.set_bytes) == (INFO, "operator", 1700)
                assert [row.info.name for row in there.router.status().workers] == ["lender-0"]
                assert (await memory.place(ASK)).decode == other.worker
                there.away = True
                await there.service.stop()
                assert await memory.budgets() == {}
                assert FleetStatus(workers=(row,)).with_budgets({}).workers == (row,)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await service.stop()

    run(main())


def test_a_budget_is_told_to_the_engine_once_even_when_it_rounds_it() -> None:
    class Rounding(CountingEngine):
        def load(self) -> WorkerLoad:
            load = super().load()
            return replace(load, budget_bytes=load.budget_bytes - load.budget_bytes % 64)

    async def main() -> None:
        engine = Rounding()
        async with cluster() as here, beating(here, engine) as heard:
            for _ in range(3):
                await heard.wait()
                heard.clear()
            assert engine.budgets == [INFO.memory_bytes]

    run(main())


@pytest.mark.parametrize(
    ("name", "budget", "status", "param", "words"),
    [
        ("decode-7", 500, 404, "worker", "decode-0"),
        (INFO.name, 99, 400, "budget", "100"),
        (INFO.name, 1001, 400, "budget", "1,000"),
        (INFO.name, 2001, 400, "budget", "2,000"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_at_once(
    name: str, budget: int, status: int, param: str, words: str
) -> None:
    async def main() -> None:
        async with cluster() as here, client(here) as frontend, beating(here, CountingEngine()) as heard:
            await heard.wait()
            with pytest.raises(RequestError, match=words) as caught:
                await frontend.set_budget(name, budget)
            assert (caught.value.status, caught.value.param) == (status, param)

    run(main())


def test_a_worker_reports_for_itself_alone() -> None:
    async def main() -> None:
        async with cluster() as here, open_channel(here.address) as channel:
            stream = report_to(channel)
            for info in (INFO, replace(INFO, worker=WorkerId("decode-1.1"), name="decode-1")):
                beat = Heartbeat(
                    info=info, sequence=1, load=WorkerLoad(), announcement=Announcement(full=True)
                )
                await stream.write(encode_heartbeat(beat))
            await stream.read()  # the answer to the first
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: not here.router.status().workers)

    run(main())


def test_requests_go_on_when_one_of_two_routers_is_lost() -> None:
    """The word of the first alone counts, and is waited for when that one is away."""

    async def main() -> None:
        engine = CountingEngine()
        async with cluster() as first, cluster() as second:
            news, duties = UnsentAnnouncements(engine), Assignment(engine, INFO)
            beats = [Heartbeats(engine, duties, here.find, news) for here in (first, second)]
            beats[0].obey(lambda: None)
            tasks = [asyncio.create_task(beat.run()) for beat in beats]
            frontend = RouterClient(first.find, second.find)
            assert (await frontend.place(ASK)).decode == INFO.worker
            await until(lambda: len(second.router.status().workers) == 1)
            second.router.drain(INFO.name, drain=True, force=True)
            await frontend.set_role(INFO.name, "mixed")
            await until(lambda: second.router.status().workers[0].info.role == "mixed")
            assert engine.takes == [(True, True)], "drained by nobody who has a say"
            second.router.drain(INFO.name, drain=False, force=True)
            await first.service.stop()
            first.away = True
            assert (await frontend.place(ASK)).decode == INFO.worker
            with pytest.raises(Unserved):
                await frontend.drain(INFO.name, drain=True)
            await frontend.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    run(main())
