"""Orders for the supervisor, from any edge through any router, over loopback sockets."""

import asyncio
from collections.abc import Mapping

import pytest

from tests.support import grpc_loop
from tidemill.cluster.messages import MemberOrder, MembersAnswer, Misses, RoleScale
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.router_client import RouterClient, at
from tidemill.workers.messages import RequestError, Role, Unserved

ROLES = (RoleScale(role="decode", workers=2, starting=("decode-1",), most=4),)
REFUSAL = RequestError("too many", param="workers", status=409, code="no_place")


class FakeSupervisor:
    """Keeps what it is asked for, and refuses 9 workers."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    async def scale(self, counts: Mapping[Role, int], *, pending: bool) -> str | None:
        if counts == {"decode": 9}:
            raise REFUSAL
        if counts == {"decode": 8}:
            raise Unserved("the supervisor is away")
        self.calls.append((dict(counts), pending))
        return "needs a GPU" if pending else None

    async def roles(self) -> tuple[RoleScale, ...]:
        return ROLES

    async def report(self, edge: str, misses: Misses, resets: int, open_requests: int) -> int:
        self.calls.append((edge, misses, resets, open_requests))
        return 5

    async def reset(self, edge: str) -> int:
        self.calls.append(edge)
        return 6

    async def members(self, order: MemberOrder) -> MembersAnswer:
        if order.kind == "revoke":
            raise RequestError("no such edge", param="name", status=404)
        self.calls.append(order)
        return MembersAnswer(edges=(), join="10.0.0.1:20002")


def test_supervisor_gets_orders_and_edges_its_answers() -> None:
    supervisor = FakeSupervisor()

    async def check() -> None:
        service = RouterService(Router(asyncio.get_running_loop().time), supervisor=supervisor)
        client = RouterClient(at(await service.start("127.0.0.1")))
        try:
            assert await client.scale({"decode": 2}, pending=False) is None
            assert await client.scale({"prefill": 1, "decode": 3}, pending=True) == "needs a GPU"
            assert await client.roles() == ROLES
            assert await client.report("edge-a", Misses(answered=7, late=2, refused=1), 4, 3) == 5
            assert await client.reset("edge-a") == 6
            with pytest.raises(RequestError, match="too many") as refused:
                await client.scale({"decode": 9}, pending=False)
            error = refused.value
            assert (error.param, error.status, error.code) == (REFUSAL.param, REFUSAL.status, REFUSAL.code)
            assert (await client.members(MemberOrder(kind="token", name="web-1"))).join == "10.0.0.1:20002"
            with pytest.raises(RequestError, match="no such edge") as refused:
                await client.members(MemberOrder(kind="revoke", name="web-2"))
            assert refused.value.status == 404
            with pytest.raises(Unserved, match="is away"):
                await client.scale({"decode": 8}, pending=False)
        finally:
            await client.close()
            await service.stop()

    grpc_loop.run(check())
    assert supervisor.calls == [
        ({"decode": 2}, False),
        ({"prefill": 1, "decode": 3}, True),
        ("edge-a", Misses(answered=7, late=2, refused=1), 4, 3),
        "edge-a",
        MemberOrder(kind="token", name="web-1"),
    ]
