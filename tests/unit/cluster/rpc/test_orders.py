"""Orders of operators over loopback sockets, from any edge through any router, and what refuses them."""

import asyncio
from typing import Any

import pytest

from tests.support.grpc_loop import in_loop
from tidemill.cluster.messages import MembersAnswer, Misses, RoleScale
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
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.router_failover import always_at
from tidemill.workers.messages import RequestError, Unserved

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

    def obey(self, order: object) -> object:
        self.carried_out.append(order)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int) -> int:
        return 5 if (edge, misses, resets, open_requests) == ("a", Misses(late=2), 4, 3) else 0


class ObedientRouter(Router):
    def __init__(self, obedient: Obedient) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._obedient = obedient

    def carry_out(self, order: RouterOrder) -> None:
        self._obedient.obey(order)


@in_loop
async def test_orders_are_carried_out_and_answers_and_refusals_come_back_whole() -> None:
    obedient = Obedient()

    service = RouterService(ObedientRouter(obedient), supervisor=obedient)
    client = RouterClient(always_at(await service.start("127.0.0.1")))
    try:
        assert await client.report("a", Misses(late=2), 4, 3) == 5
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
    finally:
        await client.close()
        await service.stop()
