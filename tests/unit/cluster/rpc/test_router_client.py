"""A frontend's calls of the router are many at a time: none is broken by what becomes of another."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from tests.support import grpc_loop
from tests.support.cluster.heartbeats import placement_request
from tidemill.cluster.messages import FleetStatus, Route
from tidemill.cluster.rpc.channels import bind, new_server
from tidemill.cluster.rpc.codec import encode
from tidemill.cluster.rpc.placement_codec import encode_placement
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.workers.messages import WorkerId

if TYPE_CHECKING:  # generic in the type stubs alone
    Handler = grpc.RpcMethodHandler[bytes, bytes]

WAIT_S_MAX = 20.0
ASK = placement_request(wait_s_max=WAIT_S_MAX)
ROUTE = Route(decode=WorkerId("decode-0.1"), decode_address="127.0.0.1:1")


def test_call_that_finds_the_router_away_leaves_those_that_wait_alone() -> None:
    """Other calls may wait for answers on the broken connection, which arrive or fail by themselves."""
    asked, answer = asyncio.Event(), asyncio.Event()
    found: list[str] = []

    async def place(_: bytes, __: object) -> bytes:
        asked.set()
        await answer.wait()
        return encode_placement(ROUTE)

    async def status(_: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        if not found:
            found.append("away")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "on its way out")
        return encode(FleetStatus(workers=()))

    async def main() -> None:
        server = new_server()
        methods: dict[str, Callable[..., Awaitable[bytes]]] = {"Place": place, "Status": status}
        handlers: dict[str, Handler] = {
            name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tidemill.Router", handlers),))
        address = bind(server, "127.0.0.1", 0)
        await server.start()

        async def find() -> str:
            return address

        client = RouterClient(find)
        async with asyncio.timeout(WAIT_S_MAX):
            placing = asyncio.create_task(client.place(ASK))
            await asked.wait()
            assert await client.status() == FleetStatus(workers=())
            assert found == ["away"]
            answer.set()
            assert await placing == ROUTE
        await client.close()
        await server.stop(grace=None)

    grpc_loop.run(main())
