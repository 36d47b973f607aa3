"""A server with as many streams as it is designed for, over loopback sockets."""

import asyncio
from contextlib import suppress
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.waits import WAIT_S_MAX
from tests.unit.cluster.rpc.test_mutual_tls import router
from tidemill.cluster.router.router import Router
from tidemill.cluster.rpc.channels import bind, cancellable, connection_broke, new_server, open_channel
from tidemill.cluster.rpc.codec import encode_heartbeat
from tidemill.cluster.rpc.placement_codec import decode_placement, encode_placement_request

pytestmark = IN_GRPC_LOOP

WORKERS = 1100


async def test_router_takes_heartbeats_of_1000_workers_and_placements() -> None:
    served = Router(asyncio.get_running_loop().time)
    async with (
        router(served=served) as address,
        open_channel(address) as channel,
        asyncio.timeout(WAIT_S_MAX),
    ):
        calls = cast("Any", channel)
        reports = [calls.stream_stream("/tidemill.Router/Report")() for _ in range(WORKERS)]
        for index, report in enumerate(reports):
            await report.write(encode_heartbeat(heartbeat(f"mixed-{index}", "mixed")))
        for report in reports:
            assert isinstance(await report.read(), bytes), "refused"
        assert len(served.status().workers) == WORKERS
        place = calls.unary_unary("/tidemill.Router/Place")
        placed = decode_placement(await place(encode_placement_request(placement_request())))
        assert not isinstance(placed, Exception)
        assert placed.decode.startswith("mixed-")
        for report in reports:
            report.cancel()


async def test_one_stream_too_many_is_refused_and_the_others_stay() -> None:
    async def echo(frames: Any, context: Any) -> None:  # noqa: ANN401 - as above
        async for frame in frames:
            await context.write(frame)

    server = new_server(3)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"Echo": grpc.stream_stream_rpc_method_handler(echo)}),)
    )
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(address) as channel, asyncio.timeout(WAIT_S_MAX):
        method = cast("Any", channel).stream_stream("/test/Echo")
        streams = [method() for _ in range(3)]
        for stream in streams:
            await stream.write(b"1")
            assert await stream.read() == b"1"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method().read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            await stream.write(b"2")
            assert await stream.read() == b"2"
            stream.cancel()
    await server.stop(grace=None)


@pytest.mark.parametrize(
    ("code", "details", "broke"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer", True),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed (recvmsg:Connection reset by peer (104))", True),
        (grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: 3", False),
        (grpc.StatusCode.INVALID_ARGUMENT, None, False),
    ],
)
def test_broken_connection_is_no_answer(code: grpc.StatusCode, details: str | None, *, broke: bool) -> None:
    nothing = grpc.aio.Metadata()
    assert connection_broke(grpc.aio.AioRpcError(code, nothing, nothing, details)) == broke


async def test_a_call_that_fails_while_it_is_cancelled_is_cancelled() -> None:
    """gRPC raises the error of such a call alone, and a caller who retries under a time limit never ends."""
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def fail() -> None:
        try:
            await asyncio.sleep(WAIT_S_MAX)
        except asyncio.CancelledError:
            raise error from None

    async def retry() -> None:
        num_calls = 0
        async with asyncio.timeout(0.01):
            while True:
                num_calls += 1
                assert num_calls == 1, "the time limit is lost"
                with suppress(grpc.aio.AioRpcError), cancellable():
                    await fail()

    with pytest.raises(TimeoutError):
        await retry()
    with pytest.raises(grpc.aio.AioRpcError), cancellable():
        raise error
