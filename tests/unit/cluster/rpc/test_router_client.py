"""A frontend's calls of the router are many at a time and independent; orders of operators and refusals."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from tests.support.cluster.heartbeats import placement_request
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.unit.cluster.rpc.test_mutual_tls import router
from tidemill.cluster.messages import FleetStatus, MembersAnswer, Misses, RoleScale, Route
from tidemill.cluster.orders import (
    Drain,
    ListEdges,
    MakeToken,
    Order,
    Reset,
    RevokeEdge,
    Roles,
    RouterOrder,
    Scale,
    SetBudget,
    SetRole,
    SupervisorOrder,
)
from tidemill.cluster.router.router import Router
from tidemill.cluster.rpc import router_failover
from tidemill.cluster.rpc.channels import bind, new_server
from tidemill.cluster.rpc.codec import encode
from tidemill.cluster.rpc.placement_codec import (
    decode_placement_requests,
    encode_placement,
    encode_placements,
)
from tidemill.cluster.rpc.placements import FRAME_REQUESTS_MAX
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.router_failover import always_at
from tidemill.workers.messages import Overloaded, RequestError, Unserved, WorkerId

pytestmark = IN_GRPC_LOOP

if TYPE_CHECKING:  # generic in the type stubs alone
    Handler = grpc.RpcMethodHandler[bytes, bytes]

WAIT_S_MAX = 20.0
ASK = placement_request(wait_s_max=WAIT_S_MAX)
ROUTE = Route(decode=WorkerId("decode-0.1"), decode_address="127.0.0.1:1")


async def serve(
    methods: dict[str, Callable[..., Awaitable[bytes]]], port: int = 0
) -> tuple[grpc.aio.Server, str]:
    server = new_server()
    handlers: dict[str, Handler] = {
        name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tidemill.Router", handlers),))
    address = bind(server, "127.0.0.1", port)
    await server.start()
    return server, address


@asynccontextmanager
async def client_of(methods: dict[str, Callable[..., Awaitable[bytes]]]) -> AsyncGenerator[RouterClient]:
    server, address = await serve(methods)
    client = RouterClient(always_at(address))
    async with asyncio.timeout(WAIT_S_MAX):
        yield client
    await client.close()
    await server.stop(grace=None)


def placing(route: Route) -> Callable[..., Awaitable[bytes]]:
    async def place(_: bytes, __: object) -> bytes:
        return encode_placement(route)

    return place


async def test_requests_that_come_meanwhile_share_a_frame() -> None:
    """A single request has a call of its own. Each of the others gets its own answer, in any order of
    waiting, and one whose client has left is not placed."""
    frames: list[list[str]] = []
    arrived, answer = asyncio.Event(), asyncio.Event()

    async def place_one(_: bytes, __: object) -> bytes:
        arrived.set()
        await answer.wait()
        return encode_placement(ROUTE)

    async def place_all(data: bytes, _: object) -> bytes:
        requests = decode_placement_requests(data)
        frames.append([request.request_id for request in requests])
        await answer.wait()
        return encode_placements(
            Overloaded("later", predicted_s=1.0, retry_after_s=2.0)
            if request.tenant == "greedy"
            else replace(ROUTE, decode=WorkerId(request.request_id))
            for request in requests
        )

    async with client_of({"Place": place_one, "PlaceAll": place_all}) as client:

        def place(name: str, tenant: str = "") -> asyncio.Task[Route]:
            return asyncio.create_task(client.place(replace(ASK, request_id=name, tenant=tenant)))

        first = place("first")
        await arrived.wait()
        later = [place(str(number)) for number in range(FRAME_REQUESTS_MAX)]
        left, refused = place("left"), place("refused", "greedy")
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        answer.set()
        assert await first == ROUTE
        routes = await asyncio.gather(*later)
        assert [route.decode for route in routes] == [str(number) for number in range(FRAME_REQUESTS_MAX)]
        with pytest.raises(Overloaded):
            await refused
        assert frames == [[str(number) for number in range(FRAME_REQUESTS_MAX)], ["refused"]]


async def test_request_without_a_worker_waits_in_a_call_of_its_own() -> None:
    framed: list[bytes] = []

    async def place_all(data: bytes, _: object) -> bytes:
        framed.append(data)
        return encode_placements(Unserved("no worker") for _ in decode_placement_requests(data))

    async with client_of({"PlaceAll": place_all, "Place": placing(ROUTE)}) as client:
        assert await asyncio.gather(client.place(ASK), client.place(ASK)) == [ROUTE] * 2
        assert len(framed) == 1, "the other one had a call of its own from the start"


async def test_call_that_finds_the_router_away_leaves_those_that_wait_alone() -> None:
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

    async with client_of({"Place": place, "Status": status}) as client:
        placing = asyncio.create_task(client.place(ASK))
        await asked.wait()
        assert await client.status() == FleetStatus(workers=())
        assert found == ["away"]
        answer.set()
        assert await placing == ROUTE


async def test_clients_return_to_the_first_router_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One router places for all clients while it runs. Another one does it meanwhile, and until the first has
    answered twice."""
    monkeypatch.setattr(router_failover, "RETURN_S", 0.1)
    questions: list[bytes] = []

    async def out(data: bytes, _: object) -> bytes:
        questions.append(data)
        return encode(frozenset[WorkerId]())

    one, two = (
        {"Place": placing(replace(ROUTE, decode=WorkerId(name))), "Out": out} for name in ("first", "second")
    )
    first, address = await serve(one)
    second, other = await serve(two)
    client = RouterClient(always_at(address), always_at(other))

    async def placed_by() -> str:
        return (await client.place(ASK)).decode

    async with asyncio.timeout(WAIT_S_MAX):
        assert await placed_by() == "first"
        await first.stop(grace=None)
        assert await placed_by() == "second"
        await asyncio.sleep(0.3)
        assert await placed_by() == "second", "it is still away"
        first, _ = await serve(one, int(address.rpartition(":")[2]))
        while await placed_by() != "first":  # noqa: ASYNC110 - it sends no event
            await asyncio.sleep(0.02)
        assert len(questions) == 2
        await second.stop(grace=None)
        assert await placed_by() == "first"
    await client.close()
    await first.stop(grace=None)


ANSWERS: list[tuple[Order[Any], object]] = [
    (SetBudget("decode-0", None), None),
    (Drain("decode-0", drain=False), None),
    (SetRole("decode-0", "mixed"), None),
    (Scale({"decode": 2}), None),
    (Scale({"prefill": 1, "decode": 3}, pending=True), "needs a GPU"),
    (Roles(), (RoleScale(role="decode", workers=2, starting=("decode-1",), most=4),)),
    (Reset("edge-a"), 6),
    (ListEdges(), MembersAnswer(edges=())),
    (MakeToken("web-1", 60.0), MembersAnswer(edges=(), join="10.0.0.1:20002")),
    (RevokeEdge("web-2"), MembersAnswer(edges=())),
]
REFUSALS = [
    RequestError("too many", param="workers", status=409, code="no_place"),
    RequestError("no such edge", param="name", status=404),
    RequestError("nothing is known of it"),
]


class Obedient:
    """A router and its supervisor, which note their orders and answer by script."""

    def __init__(self) -> None:
        self.answers: list[object] = []
        self.carried_out: list[object] = []

    async def carry_out(self, order: SupervisorOrder) -> object:
        return self.obey(order)

    def obey(self, order: object) -> Any:  # noqa: ANN401 - by script
        self.carried_out.append(order)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int) -> int:
        return 5 if (edge, misses, resets, open_requests) == ("a", Misses(late=2), 4, 3) else 0

    async def failed_rounds(self) -> int:
        return self.obey("failed rounds")


class ObedientRouter(Router):
    def __init__(self, obedient: Obedient) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._obedient = obedient

    def carry_out(self, order: RouterOrder) -> None:
        self._obedient.obey(order)


async def test_orders_are_carried_out_and_answers_and_refusals_come_back_whole() -> None:
    obedient = Obedient()
    async with router(served=ObedientRouter(obedient), supervisor=obedient) as address:
        client = RouterClient(always_at(address))
        for answer in (AttributeError("a method of later versions"), Unserved("it is away")):
            obedient.answers = [answer]
            assert await client.report("a", Misses(late=2), 4, 3) == 5
            assert (await client.status()).supervisor_failed_rounds is None
        for counted in (0, 7):
            obedient.answers = [counted]
            assert await client.report("a", Misses(late=2), 4, 3) == 5
            assert (await client.status()).supervisor_failed_rounds == counted
        for order, answer in ANSWERS:
            obedient.answers = [answer]
            assert await client.carry_out(order) == answer
            assert obedient.carried_out.pop() == order
            for refusal in REFUSALS:
                obedient.answers = [refusal]
                with pytest.raises(RequestError) as refused:
                    await client.carry_out(order)
                assert str(refused.value) == str(refusal)
                assert vars(refused.value) == vars(refusal)
            obedient.answers = [Unserved("the supervisor is away")]
            with pytest.raises(Unserved, match="is away"):
                await client.carry_out(order)
        await client.close()
