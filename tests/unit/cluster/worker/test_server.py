"""The data plane: whole streams, one frame a step; lost peers, slow readers, impostors and garbage."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

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
from tidemill.cluster.rpc.channels import bind, new_server
from tidemill.cluster.rpc.codec import (
    Cancel,
    ClientFrame,
    Generate,
    Hello,
    Prefetch,
    Produce,
    StreamItem,
    decode_client_frame,
    encode,
    encode_client_frame,
    encode_worker_frame,
)
from tidemill.cluster.worker.server import ServerLimits
from tidemill.kvstore.errors import OutOfMemory
from tidemill.workers.messages import (
    Delta,
    PagesMissing,
    Produced,
    Provenance,
    Request,
    RequestError,
    WorkerGone,
    WorkerId,
)

pytestmark = IN_GRPC_LOOP


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


@pytest.mark.parametrize(
    "failure", [PagesMissing("m"), WorkerGone("w"), RequestError("r"), OutOfMemory("o"), None]
)
async def test_prefetch_that_ends_fails_or_is_cancelled_leaves_the_stream_alone(
    failure: Exception | None,
) -> None:
    async with serving() as (engine, address), frontend() as peers:
        async with aclosing(answer_of(peers, request("a"), address)) as stream:
            first = asyncio.ensure_future(anext(stream))
            prefetch, part = (
                asyncio.create_task(peers.prefetch(WORKER, address, request(name))) for name in ("p", "part")
            )
            await engine.until(lambda engine: len(engine.calls) == 3)
            part.cancel()
            await engine.until(lambda engine: len(engine.calls) == 2)
            if failure is None:
                engine.step(("p", Produced(depth=64, provenance=Provenance(fetched_tokens=64))))
                await prefetch
            else:
                engine.step(("p", failure))
                await fails(prefetch, WorkerGone if isinstance(failure, OutOfMemory) else type(failure))
            engine.step(("a", FIRST))
            assert await first == FIRST
        await engine.until(lambda engine: not engine.calls)
        answer = asyncio.create_task(peers.produce(WORKER, address, request("p")))
        await engine.until(lambda engine: "p" in engine.calls)
        answer.cancel()
        await engine.until(lambda engine: not engine.calls)


async def test_one_step_is_one_frame() -> None:
    names = [f"r{i}" for i in range(50)]
    async with serving() as (engine, address), raw_stream(address) as stream:
        await stream.send(Hello(WORKER), *(Generate(i, request(name)) for i, name in enumerate(names)))
        await engine.until(lambda engine: len(engine.calls) == len(names))
        for token in range(5):
            delta = Delta(tokens=(token,))
            engine.step(*((name, delta) for name in names))
            assert await stream.frame() == [StreamItem(i, delta) for i in range(len(names))]


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


KINDS = (Generate, Produce, Prefetch)


async def test_frontend_that_vanishes_or_closes_its_stream_holds_nothing() -> None:
    async with serving() as (engine, address):
        async with raw_stream(address) as stream:
            await stream.send(
                Hello(WORKER), *(kind(call, request(str(call))) for call, kind in enumerate(KINDS))
            )
            await engine.until(lambda engine: len(engine.calls) == len(KINDS))
        await engine.until(lambda engine: not engine.calls)
        async with raw_stream(address) as stream:
            await stream.send(Hello(WORKER), Generate(1, request("a")))
            await engine.until(lambda engine: len(engine.calls) == 1)
            await stream.call.done_writing()
            await engine.until(lambda engine: not engine.calls)


async def test_lost_worker_fails_all_its_calls() -> None:
    async with frontend() as peers:
        async with serving() as (engine, address):
            streams = [
                asyncio.create_task(collect(answer_of(peers, request(name), address))) for name in "abc"
            ]
            answer = asyncio.create_task(peers.produce(WORKER, address, request("p")))
            prefetch = asyncio.create_task(peers.prefetch(WORKER, address, request("f")))
            await engine.until(lambda engine: len(engine.calls) == 5)
        for call in [*streams, answer, prefetch]:
            assert WORKER in await fails(call, WorkerGone)
        assert WORKER in await fails(peers.produce(WORKER, address, request()), WorkerGone)


async def test_another_life_of_the_worker_is_not_the_worker() -> None:
    async with serving() as (engine, address), frontend() as peers:
        before = WorkerId("decode-0.0")
        await fails(collect(answer_of(peers, request(), address, before)), WorkerGone)
        await fails(peers.prefetch(before, address, request()), WorkerGone)
        assert not engine.calls


async def test_slow_frontend_does_not_hold_up_the_engine() -> None:
    """The engine makes more than a connection buffers; what is not read is given up, and nothing waits."""
    limits = ServerLimits(items_max=50)
    async with serving(limits) as (engine, address), raw_stream(address) as stream:
        await stream.send(Hello(WORKER), Generate(1, request("slow")))
        await engine.until(lambda engine: "slow" in engine.calls)
        delta = Delta(tokens=tuple(range(100_000, 101_000)))
        made = 0
        while "slow" in engine.calls:
            engine.step(("slow", delta))
            made += 1
            assert made < 100_000, "nothing bounds what a frontend may leave unread"
            await asyncio.sleep(0)
        items = await stream.frame()
        while items[-1].body == delta:
            items += await stream.frame()
        assert isinstance(items[-1].body, PagesMissing)
        assert all(item.body == delta for item in items[:-1])


async def test_slow_reader_gets_kept_items_and_then_retries() -> None:
    async with serving() as (engine, address), frontend(unread_items_max=10) as peers:
        slow, fast = (answer_of(peers, request(name), address) for name in ("slow", "fast"))
        firsts = [asyncio.ensure_future(anext(stream)) for stream in (slow, fast)]
        await engine.until(lambda engine: len(engine.calls) == 2)
        engine.step(("slow", FIRST), ("fast", FIRST))
        for first in firsts:
            await first
        for token in range(13):  # one more than the reader may be behind, and two in the generator
            delta = Delta(tokens=(token,))
            engine.step(("slow", delta), ("fast", delta))
            assert await anext(fast) == delta
        await engine.until(lambda engine: "slow" not in engine.calls)
        assert [(await anext(slow)).tokens for _ in range(12)] == [(token,) for token in range(12)]
        await fails(anext(slow), PagesMissing)
        engine.step(("fast", LAST))
        assert await anext(fast) == LAST
        await fast.aclose()


async def test_frontend_has_a_bounded_number_of_calls() -> None:
    async with serving(ServerLimits(calls_max=2)) as (engine, address), raw_stream(address) as stream:
        await stream.send(Hello(WORKER), *(Generate(i, request(str(i))) for i in range(3)))
        (item,) = await stream.frame()
        assert item.call == 2
        assert isinstance(item.body, PagesMissing), "the worker is healthy and must not be dropped"
        assert sorted(engine.calls) == ["0", "1"]


HELLO, WORK = encode_client_frame(Hello(WORKER)), encode_client_frame(Generate(1, request("work")))
FETCH = encode_client_frame(Prefetch(1, request("fetch")))
MALFORMED = [
    [b""],
    [b"\xff" * 40],
    [WORK],
    [FETCH],
    [HELLO, HELLO],
    [HELLO, WORK, WORK],
    [HELLO, FETCH, WORK],
    [HELLO, WORK, FETCH],
    [HELLO, WORK, b""],
]


async def test_malformed_frames_tie_up_nothing_and_kill_nothing() -> None:
    """Garbage ends the stream that it came on; every other frontend goes on."""
    random = Random(5)
    fuzz = [[HELLO, WORK, random.randbytes(random.randrange(1, 60))] for _ in range(50)]

    async with serving() as (engine, address), frontend() as peers:
        healthy = asyncio.create_task(collect(answer_of(peers, request("healthy"), address)))
        await engine.until(lambda engine: "healthy" in engine.calls)
        for frames in MALFORMED + fuzz:
            async with raw_stream(address) as stream:
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # refused already
                    for frame in frames:
                        await stream.call.write(frame)
                if frames in MALFORMED:
                    assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await engine.until(lambda engine: list(engine.calls) == ["healthy"])
        engine.step(("healthy", FIRST), ("healthy", LAST))
        assert await healthy == [FIRST, LAST]


@asynccontextmanager
async def impostor(
    serve: Callable[[AsyncIterator[bytes], Any], Coroutine[Any, Any, None]],
) -> AsyncGenerator[str]:
    """Something else that listens where a worker should."""
    server = new_server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "tidemill.Worker", {"Stream": grpc.stream_stream_rpc_method_handler(serve)}
            ),
        )
    )
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=None)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"\xff" * 20, "not the expected message"), (encode([(1, ("Surprise",))]), "Surprise")],
)
async def test_worker_that_talks_nonsense_is_gone(data: bytes, reason: str) -> None:
    async def serve(frames: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401 - as above
        await anext(frames)
        await anext(frames)
        await context.write(data)
        await anext(frames)

    async with impostor(serve) as address, frontend() as peers:
        assert reason in await fails(peers.produce(WORKER, address, request()), WorkerGone)


async def test_call_that_has_ended_is_not_cancelled() -> None:
    async def serve(frames: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401 - as above
        produced = Produced(depth=0, provenance=Provenance())
        answers = {Generate: LAST, Produce: produced, Prefetch: produced}
        async for data in frames:
            frame = decode_client_frame(data)
            if isinstance(frame, Cancel):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing to cancel")
            elif not isinstance(frame, Hello):
                await context.write(encode_worker_frame([StreamItem(frame.call, answers[type(frame)])]))

    async with impostor(serve) as address, frontend() as peers:
        for _ in range(3):
            assert await collect(answer_of(peers, request(), address)) == [LAST]
            await peers.produce(WORKER, address, request())
            await peers.prefetch(WORKER, address, request())


async def test_prefetch_is_cancelled_before_the_request_that_it_was_for() -> None:
    """The worker never fetches for a prefetch and for its request concurrently."""
    received: list[ClientFrame] = []
    came = asyncio.Queue[ClientFrame]()

    async def serve(frames: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401, ARG001 - as above
        async for data in frames:
            received.append(frame := decode_client_frame(data))
            came.put_nowait(frame)

    async def until_received(kind: type[ClientFrame]) -> None:
        while not isinstance(await came.get(), kind):
            pass

    async with impostor(serve) as address, frontend() as peers:
        prefetch = asyncio.create_task(peers.prefetch(WORKER, address, request("a")))
        await until_received(Prefetch)
        prefetch.cancel()
        await asyncio.wait([prefetch])
        stream = asyncio.create_task(collect(answer_of(peers, request("a"), address)))
        await until_received(Generate)
    await fails(stream, WorkerGone)
    assert received == [Hello(WORKER), Prefetch(1, request("a")), Cancel(1), Generate(2, request("a"))]


async def test_prompt_too_large_to_send_is_the_users_mistake() -> None:
    async with serving() as (_, address), frontend() as peers:
        huge = Request(request_id="huge", tokens=(2**31,) * 4_500_000, max_new_tokens=1)
        await fails(peers.produce(WORKER, address, huge), RequestError)
