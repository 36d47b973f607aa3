"""A connection breaks between two running processes: no worker has crashed, also not of a request on
trial."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from tests.support.cluster.fake_engine import FakeEngine, pooled
from tests.support.cluster.scripted_engine import FIRST, WORKER, answer_of, fails, frontend, request
from tests.support.e2e.link import Link
from tests.support.grpc_loop import IN_GRPC_LOOP
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.worker.server import WorkerServer
from tidemill.workers.messages import CrashedAlone, Delta, HandedOver, PagesMissing, WorkerGone

pytestmark = IN_GRPC_LOOP


class Line:
    """A connection to a worker, through a proxy that resets it at its next bytes on demand."""

    def __init__(self) -> None:
        self.link = Link()
        self.engine = FakeEngine()
        self.plane = WorkerServer(self.engine, WORKER)

    async def first(self, call: Awaitable[Delta], name: str, *, alone: bool = False) -> None:
        """Return when the call has its first token."""
        waiting = asyncio.ensure_future(call)
        await self.engine.until(lambda engine: name in engine.calls)
        notify = self.engine.calls[name].notify
        assert notify is not None
        if alone:
            await notify(True)  # noqa: FBT003 - the signature of Notify
        self.engine.step((name, FIRST))
        assert await waiting == FIRST


@asynccontextmanager
async def line() -> AsyncGenerator[tuple[Line, WorkerClients, str]]:
    here = Line()
    address = await here.link.to(await here.plane.start("127.0.0.1"))
    try:
        async with frontend() as peers:
            yield here, peers, address
    finally:
        await here.plane.stop()


async def _drained(deltas: AsyncGenerator[Delta]) -> None:
    """Read to the end: the token may pass by just before the connection breaks at other bytes."""
    async for _ in deltas:
        pass


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("num_resets", [1, 3])
async def test_worker_that_still_runs_is_called_again(num_resets: int, *, alone: bool) -> None:
    """The connections that ask whether it still runs may break as well."""
    async with line() as (here, peers, address):
        async with aclosing(answer_of(peers, request("a"), address)) as deltas:
            await here.first(anext(deltas), "a", alone=alone)
            here.link.resets = num_resets
            here.engine.step(("a", FIRST))
            assert "still runs" in await fails(_drained(deltas), PagesMissing)
        assert not here.link.resets
        assert 1 <= here.link.num_resets <= num_resets
        await here.engine.until(lambda engine: not engine.calls)
        async with aclosing(answer_of(peers, request("b"), address)) as deltas:
            await here.first(anext(deltas), "b")


async def test_connection_that_breaks_before_its_first_answer_is_no_loss() -> None:
    async with line() as (here, peers, address):
        async with aclosing(answer_of(peers, request("a"), address)) as deltas:
            answer = asyncio.ensure_future(_drained(deltas))
            await here.engine.until(lambda engine: "a" in engine.calls)
            here.link.resets = 1
            here.engine.step(("a", FIRST))
            assert "still runs" in await fails(answer, PagesMissing)
        assert here.link.num_resets == 1


@pytest.mark.parametrize("alone", [False, True])
async def test_crashed_worker_is_not_taken_for_a_broken_connection(*, alone: bool) -> None:
    async with (
        line() as (here, peers, address),
        aclosing(answer_of(peers, request("a"), address)) as deltas,
    ):
        await here.first(anext(deltas), "a", alone=alone)
        await here.plane.stop()
        await fails(anext(deltas), CrashedAlone if alone else WorkerGone)


async def test_worker_is_asked_to_release_what_a_tenant_retains() -> None:
    async with line() as (here, peers, address):
        peers.release(WORKER, address, "key:a", "prefix")
        await here.engine.until(lambda engine: engine.released == [("key:a", "prefix")])


async def test_a_worker_that_takes_no_streams_pools() -> None:
    async with line() as (here, peers, address):
        here.engine.restrict(produces=True, generates=False)
        asked = replace(request("a"), pools=True, max_new_tokens=0)
        running = asyncio.create_task(here.engine.run())
        (delta,) = [delta async for delta in answer_of(peers, asked, address)]
        running.cancel()
        assert (delta.pooled, delta.finish, delta.tokens) == (pooled(asked.tokens), "stop", ())
        here.engine.restrict(produces=False, generates=False)
        await fails(anext(answer_of(peers, asked, address)), HandedOver)
