"""Streams and answers over a loopback socket: whole, in order, one frame per step, cancelled when closed."""

import asyncio
from contextlib import aclosing
from functools import partial

import pytest

from tests.support.cluster.scripted_engine import (
    FIRST,
    IN_GRPC_LOOP,
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
from tidemill.cluster.edge.flow import serve
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.rpc.codec import (
    Generate,
    Hello,
    StreamItem,
)
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.workers.inbox import generated
from tidemill.workers.messages import (
    Delta,
    EngineInfo,
    PagesMissing,
    Produced,
    Provenance,
    RequestError,
    WorkerGone,
    WorkerId,
)

pytestmark = IN_GRPC_LOOP


def root_of(salt: str) -> PageKey:
    return Namespace(model="m", layout="l", salt=salt).root()


async def test_streams_and_answers_arrive_whole() -> None:
    async with serving() as (engine, address), frontend() as peers:
        streams = [asyncio.create_task(collect(answer_of(peers, request(name), address))) for name in "ab"]
        answer = asyncio.create_task(peers.produce(WORKER, address, request("p")))
        await engine.until(lambda engine: len(engine.calls) == 3)
        produced = Produced(depth=64, provenance=Provenance(computed_tokens=64))
        engine.step(("a", FIRST), ("b", FIRST), ("p", produced))
        engine.step(("a", Delta(tokens=(5,))), ("b", LAST))
        engine.step(("a", LAST))
        assert await answer == produced
        assert await streams[1] == [FIRST, LAST]
        assert await streams[0] == [FIRST, Delta(tokens=(5,)), LAST]
        await engine.until(lambda engine: not engine.calls)


async def test_prefetch_runs_until_it_has_all_or_is_cancelled() -> None:
    async with serving() as (engine, address), frontend() as peers:
        whole, part = (
            asyncio.create_task(peers.prefetch(WORKER, address, request(name))) for name in ("a", "b")
        )
        await engine.until(lambda engine: len(engine.calls) == 2)
        engine.step(("a", Produced(depth=64, provenance=Provenance(fetched_tokens=64))))
        await whole
        part.cancel()
        await engine.until(lambda engine: not engine.calls)


@pytest.mark.parametrize("failure", [PagesMissing("m"), WorkerGone("w"), RequestError("r"), OutOfMemory("o")])
async def test_failed_prefetch_leaves_the_stream_alone(failure: Exception) -> None:
    async with serving() as (engine, address), frontend() as peers:
        answers = asyncio.create_task(collect(answer_of(peers, request("a"), address)))
        prefetch = asyncio.create_task(peers.prefetch(WORKER, address, request("p")))
        await engine.until(lambda engine: len(engine.calls) == 2)
        engine.step(("p", failure))
        await fails(prefetch, WorkerGone if isinstance(failure, OutOfMemory) else type(failure))
        engine.step(("a", FIRST), ("a", LAST))
        assert await answers == [FIRST, LAST]


async def test_one_step_is_one_frame() -> None:
    names = [f"r{i}" for i in range(50)]
    async with serving() as (engine, address), raw_stream(address) as stream:
        await stream.send(Hello(WORKER), *(Generate(i, request(name)) for i, name in enumerate(names)))
        await engine.until(lambda engine: len(engine.calls) == len(names))
        for token in range(5):
            delta = Delta(tokens=(token,))
            engine.step(*((name, delta) for name in names))
            assert await stream.frame() == [StreamItem(i, delta) for i in range(len(names))]


@pytest.mark.parametrize("failure", [PagesMissing("gap of 9 pages"), WorkerGone("draining")])
async def test_failures_of_the_engine_are_failures_of_the_call(failure: Exception) -> None:
    async with serving() as (engine, address), frontend() as peers:
        stream = asyncio.create_task(collect(answer_of(peers, request("a"), address)))
        answer = asyncio.create_task(peers.produce(WORKER, address, request("p")))
        await engine.until(lambda engine: len(engine.calls) == 2)
        engine.step(("a", failure), ("p", failure))
        assert await fails(stream, type(failure)) == str(failure)
        assert await fails(answer, type(failure)) == str(failure)


async def test_users_mistake_keeps_its_name() -> None:
    async with serving() as (engine, address), frontend() as peers:
        stream = asyncio.create_task(collect(answer_of(peers, request(), address)))
        await engine.until(lambda engine: "r" in engine.calls)
        engine.step(("r", RequestError("too long", param="prompt", code="context_length_exceeded")))
        with pytest.raises(RequestError, match="too long") as caught:
            await stream
        assert (caught.value.param, caught.value.status, caught.value.code) == (
            "prompt",
            400,
            "context_length_exceeded",
        )


@pytest.mark.parametrize("error", [OutOfMemory("full"), AssertionError("a bug")])
async def test_whatever_else_breaks_a_request_breaks_it_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (engine, address), frontend() as peers:
        poisoned = asyncio.create_task(collect(answer_of(peers, request("poisoned"), address)))
        healthy = asyncio.create_task(collect(answer_of(peers, request("healthy"), address)))
        await engine.until(lambda engine: len(engine.calls) == 2)
        engine.step(("poisoned", error), ("healthy", FIRST))
        assert type(error).__name__ in await fails(poisoned, WorkerGone)
        engine.step(("healthy", LAST))
        assert await healthy == [FIRST, LAST]
    ours = [record for record in caplog.records if record.name.startswith("tidemill")]
    assert bool(ours) == isinstance(error, AssertionError), "a bug leaves its traceback, and only a bug"


async def test_closing_a_stream_cancels_it_on_the_worker() -> None:
    async with serving() as (engine, address), frontend() as peers:
        async with aclosing(answer_of(peers, request("a"), address)) as stream:
            first = asyncio.ensure_future(anext(stream))
            await engine.until(lambda engine: "a" in engine.calls)
            engine.step(("a", FIRST))
            assert await first == FIRST
        await engine.until(lambda engine: not engine.calls)

        answer = asyncio.create_task(peers.produce(WORKER, address, request("p")))
        await engine.until(lambda engine: "p" in engine.calls)
        answer.cancel()
        await engine.until(lambda engine: not engine.calls)


class OneRoute:
    """A router that knows one way."""

    def __init__(self, route: Route) -> None:
        self.route = route

    async def place(self, request: PlacementRequest) -> Route:
        assert request.request_id == "a"
        return self.route

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        pytest.fail(f"{worker} was not lost, {blamed.hex()} not to blame")


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_flow_ends_a_prefetch_with_its_prompt(*, hangs_up: bool) -> None:
    """Through real streams to two workers: the prefetch is over before the request is there."""
    async with serving() as (prefill, at_p), serving() as (decode, at_d), frontend() as peers:
        router = OneRoute(Route(decode=WORKER, decode_address=at_d, prefill=WORKER, prefill_address=at_p))
        answer = partial(serve, request("a"), router, peers, root_of, EngineInfo(page_tokens=2))
        async with aclosing(generated(answer)) as pieces:
            first = asyncio.ensure_future(anext(pieces))
            await prefill.until(lambda engine: engine.begun == ["produce"])
            await decode.until(lambda engine: engine.begun == ["prefetch"])
            if hangs_up:
                first.cancel()
                await asyncio.wait([first])
                await prefill.until(lambda engine: not engine.calls)
            else:
                prefill.step(("a", Produced(depth=2, provenance=Provenance())))
                await decode.until(lambda engine: engine.begun == ["prefetch", "generate"])
                decode.step(("a", FIRST), ("a", LAST))
                assert (await first).tokens == FIRST.tokens
                assert [piece.tokens async for piece in pieces] == [LAST.tokens]
            await decode.until(lambda engine: not engine.calls)
    assert prefill.begun == ["produce"]
    assert decode.begun == (["prefetch"] if hangs_up else ["prefetch", "generate"])


async def test_request_can_be_sent_again_while_it_is_being_cancelled() -> None:
    async with serving() as (engine, address), frontend() as peers:
        for _ in range(20):
            stream = answer_of(peers, request("a"), address)
            first = asyncio.ensure_future(anext(stream))
            await engine.until(lambda engine: "a" in engine.calls)
            engine.step(("a", FIRST))
            await first
            await stream.aclose()
            again = asyncio.create_task(collect(answer_of(peers, request("a"), address)))
            await engine.until(lambda engine: not engine.calls)
            await engine.until(lambda engine: "a" in engine.calls)
            engine.step(("a", FIRST), ("a", LAST))
            assert await again == [FIRST, LAST]
