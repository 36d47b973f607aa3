"""A trial as both ends of the data plane see it, planned hand-overs, and workers that are given up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.support.cluster.fake_engine import FakeEngine
from tests.support.cluster.scripted_engine import (
    FIRST,
    LAST,
    WORKER,
    answer_of,
    collect,
    fails,
    frontend,
    raw_stream,
    request,
    serving,
)
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.waits import until
from tidemill.cluster.rpc.codec import Generate, Hello, StreamItem
from tidemill.cluster.worker.server import WorkerServer
from tidemill.workers.messages import CrashedAlone, Delta, HandedOver, LostAlone, WorkerGone

pytestmark = IN_GRPC_LOOP

MORE_THAN_IS_BUFFERED = Delta(tokens=(2**31,) * 2_000_000)
"""10 MB: a connection takes 4 whose other end does not read."""


async def notify(engine: FakeEngine, name: str, *, alone: bool) -> None:
    """Notify the edges, and return when they must know."""
    callback = engine.calls[name].notify
    assert callback is not None
    await callback(alone)


async def is_no_suspect(answer: Awaitable[object]) -> None:
    with pytest.raises(WorkerGone) as gone:
        await answer
    assert not isinstance(gone.value, CrashedAlone | LostAlone)


async def begun(engine: FakeEngine, *names: str) -> None:
    await engine.until(lambda engine: set(names) <= set(engine.calls))


@pytest.mark.parametrize("kind", ["generate", "produce"])
async def test_worker_that_crashes_in_a_trial_blames_only_its_request(kind: str) -> None:
    engine = FakeEngine()
    plane = WorkerServer(engine, WORKER)
    address = await plane.start("127.0.0.1")
    async with frontend() as peers, frontend() as others:
        suspect = (
            asyncio.create_task(collect(answer_of(peers, request("suspect"), address)))
            if kind == "generate"
            else asyncio.create_task(peers.produce(WORKER, address, request("suspect")))
        )
        beside = asyncio.create_task(collect(answer_of(peers, request("beside"), address)))
        cleared = asyncio.create_task(collect(answer_of(others, request("cleared"), address)))
        await begun(engine, "suspect", "beside", "cleared")
        await notify(engine, "cleared", alone=True)
        engine.step(("cleared", FIRST))
        await notify(engine, "cleared", alone=False)
        await notify(engine, "suspect", alone=True)
        await plane.stop()  # immediately: all edges know by now
        await fails(suspect, CrashedAlone)
        await is_no_suspect(beside)
        await is_no_suspect(cleared)


async def test_trial_begins_when_every_edge_has_the_tokens_of_the_others() -> None:
    """Otherwise they would lose them in a crash, and draw more in their own trials than those cover."""
    async with serving() as (engine, address), frontend() as peers, raw_stream(address) as slow:
        await slow.send(Hello(WORKER), Generate(1, request("slow")))
        suspect = answer_of(peers, request("suspect"), address)
        answer = asyncio.ensure_future(anext(suspect))
        await begun(engine, "slow", "suspect")
        engine.step(("slow", MORE_THAN_IS_BUFFERED))
        notifying = asyncio.create_task(notify(engine, "suspect", alone=True))
        for _ in range(3):  # its own frontend knows by now
            engine.step(("suspect", FIRST))
            assert await answer == FIRST
            answer = asyncio.ensure_future(anext(suspect))
        assert not notifying.done()
        assert await slow.frame() == [StreamItem(1, MORE_THAN_IS_BUFFERED)]
        await notifying
        engine.step(("suspect", LAST))
        assert await answer == LAST
        await suspect.aclose()


@pytest.mark.parametrize("gives_up", [True, False], ids=["given up", "no answer to a ping"])
async def test_worker_that_falls_silent_in_a_trial_does_not_count_as_crashed(*, gives_up: bool) -> None:
    async with serving() as (engine, address), wire(address) as (through, frozen), frontend() as peers:
        suspect = answer_of(peers, request("suspect"), through)
        beside = asyncio.create_task(collect(answer_of(peers, request("beside"), through)))
        first = asyncio.ensure_future(anext(suspect))
        await begun(engine, "suspect", "beside")
        await notify(engine, "suspect", alone=True)
        engine.step(("suspect", FIRST), ("beside", FIRST))
        assert await first == FIRST
        if gives_up:
            peers.give_up({WORKER})
        else:
            frozen.set()
        await fails(anext(suspect), LostAlone)
        await is_no_suspect(beside)


@asynccontextmanager
async def wire(address: str) -> AsyncGenerator[tuple[str, asyncio.Event]]:
    """Another address of the server; nothing passes once the event is set, and nothing is closed."""
    frozen = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []
    ways: list[asyncio.Task[None]] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not frozen.is_set():
                    writer.write(data)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, to_writer))
        ends = (carry(reader, to_writer), carry(to_reader, writer))
        ways.extend(map(asyncio.ensure_future, ends))

    server = await asyncio.start_server(connect, "127.0.0.1")
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", frozen
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*ways)


async def test_worker_that_owes_answers_is_silent_after_a_while_and_can_be_given_up() -> None:
    async with serving() as (engine, address), frontend() as peers:
        assert peers.silent() == frozenset()
        stream = asyncio.create_task(collect(answer_of(peers, request(), address)))
        await begun(engine, "r")
        assert peers.silent() == frozenset()
        await until(lambda: WORKER in peers.silent())
        engine.step(("r", FIRST))
        await until(lambda: not peers.silent())
        await until(lambda: WORKER in peers.silent())
        peers.give_up({WORKER})
        assert "its heartbeats stopped" in await fails(stream, WorkerGone)
        await engine.until(lambda engine: not engine.calls)  # the worker was notified
        assert peers.silent() == frozenset()
        again = asyncio.create_task(collect(answer_of(peers, request("again"), address)))
        await begun(engine, "again")
        engine.step(("again", FIRST), ("again", LAST))
        assert await again == [FIRST, LAST]


async def test_calls_are_counted_until_all_have_been_sent_their_ends() -> None:
    engine = FakeEngine()
    plane = WorkerServer(engine, WORKER)
    address = await plane.start("127.0.0.1")
    try:
        async with frontend() as peers:
            fetching = asyncio.create_task(peers.prefetch(WORKER, address, request("p")))
            stream = asyncio.create_task(collect(answer_of(peers, request(), address)))
            await begun(engine, "p", "r")
            assert plane.num_calls == 1, "a lost prefetch is no loss"
            engine.step(("r", HandedOver("it goes")))
            await until(lambda: not plane.num_calls)
            await plane.flush()
            await plane.stop()
            assert await fails(stream, HandedOver) == "it goes"
            with suppress(WorkerGone):
                await fetching
    finally:
        await plane.stop()
