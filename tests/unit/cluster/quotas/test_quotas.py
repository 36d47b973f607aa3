"""Open answers and tokens of a key are counted over all edges; no process that ends keeps or blocks them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import grpc_loop
from tests.support.sockets import free_port
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys, digest_of
from tidemill.cluster.quotas import edge_quotas, router_quotas
from tidemill.cluster.quotas.edge_quotas import LimitReached
from tidemill.cluster.quotas.rate_client import RouterRates, in_order
from tidemill.cluster.quotas.rates import MINUTE_S
from tidemill.cluster.quotas.router_quotas import LEASE_S, QuotaRequest, Quotas
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService

KEY = ApiKey(tenant="shop", sha256=digest_of("sk-shop"), max_parallel_requests=2)
RATED = ApiKey(tenant="shop", sha256=digest_of("sk-rated"), tokens_per_minute=600)


class Cluster:
    """Two routers and some edges."""

    def __init__(self, num_edges: int, *keys: ApiKey) -> None:
        time_s = asyncio.get_running_loop().time
        self.ports = [free_port(), free_port()]
        self.routers = {f"127.0.0.1:{port}": RouterService(Router(time_s)) for port in self.ports}
        self.clients = [RouterRates(f"edge-{n}", lambda: list(self.routers), None) for n in range(num_edges)]
        self.edges = [ApiKeys(keys, time_s) for _ in self.clients]
        for edge, client in zip(self.edges, self.clients, strict=True):
            edge.shared = client

    def first(self, key: ApiKey) -> RouterService:
        return self.routers[in_order(list(self.routers), key.sha256)[0]]


@asynccontextmanager
async def running(num_edges: int, *keys: ApiKey) -> AsyncGenerator[Cluster]:
    cluster = Cluster(num_edges, *keys)
    for port, router in zip(cluster.ports, cluster.routers.values(), strict=True):
        await router.start("127.0.0.1", port)
    try:
        yield cluster
    finally:
        for client in cluster.clients:
            await client.close()
        for router in cluster.routers.values():
            await router.stop()


async def refusal(edge: ApiKeys, key: ApiKey, num_tokens: int = 1) -> LimitReached | None:
    """Begin and end an answer, or return why it may not begin."""
    try:
        async with edge.answering(key, num_tokens):
            return None
    except LimitReached as error:
        return error


def run(check: Callable[[Cluster], Awaitable[None]], num_edges: int, *keys: ApiKey) -> None:
    async def main() -> None:
        async with running(num_edges, *keys) as cluster:
            await check(cluster)

    grpc_loop.run(main())


def test_open_answers_are_counted_over_all_edges_until_they_end() -> None:
    async def check(cluster: Cluster) -> None:
        one, two, three = cluster.edges
        for _ in range(20):  # the end is known before the next one may ask anywhere
            async with one.answering(KEY, 1), two.answering(KEY, 1):
                refused = await refusal(three, KEY)
                assert refused is not None
                assert (refused.limit, refused.retry_after_s) == (None, router_quotas.RETRY_S)
                assert await refusal(one, KEY) is not None
            for edge in cluster.edges:
                assert await refusal(edge, KEY) is None

    run(check, 3, KEY)


def test_burst_is_granted_up_to_the_limit_and_clients_that_leave_hold_nothing() -> None:
    async def check(cluster: Cluster) -> None:
        one, two = cluster.edges
        ends = asyncio.Event()

        async def hold() -> bool:
            try:
                async with one.answering(KEY, 1):
                    await ends.wait()
            except LimitReached:
                return False
            return True

        held = [asyncio.create_task(hold()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in held[::2]:  # while the router is asked
            task.cancel()
        _, waiting = await asyncio.wait(held, timeout=1.0)
        assert len(waiting) <= 2
        ends.set()
        answers = await asyncio.gather(*held, return_exceptions=True)
        assert sum(answer is True for answer in answers) == len(waiting)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(two.answering(KEY, 1))

    run(check, 2, KEY)


def test_killed_edge_and_dead_routers_block_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_quotas, "RENEW_S", 0.1)
    monkeypatch.setattr(router_quotas, "LEASE_S", 0.5)

    async def check(cluster: Cluster) -> None:
        one, two = cluster.edges
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(one.answering(KEY, 1))
            await asyncio.sleep(1.0)
            assert await refusal(two, KEY) is not None, "an edge that lives renews what it has open"
            await cluster.first(KEY).stop()
            await asyncio.sleep(0.3)
            assert await refusal(two, KEY) is not None, "the next router learns of it"
            one.shared = None  # no router learns of the first edge any more
            await asyncio.sleep(0.6)
            assert await refusal(two, KEY) is None
            for router in cluster.routers.values():
                await router.stop()
            for _ in range(2):
                await stack.enter_async_context(two.answering(KEY, 1))
            assert await refusal(two, KEY) is not None, "without a router each edge has the limit"

    run(check, 2, KEY)


def test_tokens_of_all_edges_are_counted_and_a_router_that_ends_loses_none_of_the_edge_that_asks() -> None:
    async def check(cluster: Cluster) -> None:
        one, two = cluster.edges
        async with one.answering(RATED, 100) as answer:
            assert answer is not None
            answer.generated = lambda: 450
        assert await refusal(two, RATED, 60) is None, "it has tokens left, and may take more than these"
        refused = await refusal(two, RATED)
        assert refused is not None
        assert (refused.limit, refused.most) == ("tokens", 600)
        assert refused.retry_after_s == pytest.approx(11 * MINUTE_S / 600, abs=0.9)
        await cluster.first(RATED).stop()
        assert await refusal(two, RATED) is not None, "the edge tells the next router"
        for router in cluster.routers.values():
            await router.stop()
        assert await refusal(two, RATED) is not None, "and knows it without one"

    run(check, 2, RATED)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.floats(0, 2)), max_size=40), st.integers(1, 5)
)
def test_edges_never_hold_more_than_the_limit(turns: list[tuple[int, int, float]], most: int) -> None:
    """Each edge begins all that it may; one that is silent for longer than a lease has ended."""
    counted, now_s, held = Quotas(), 0.0, dict.fromkeys(range(3), (0, 0.0))
    for edge, wanted, later_s in turns:
        now_s += later_s
        held = {name: (count if until > now_s else 0, until) for name, (count, until) in held.items()}
        asked = QuotaRequest(
            name="a", edge=str(edge), open=held[edge][0], wanted=(1,) * wanted, parallel_max=most
        )
        grant = counted.ask(asked, now_s)
        others = sum(count for name, (count, _) in held.items() if name != edge)
        assert grant.granted == max(0, min(wanted, most - others - held[edge][0]))
        held[edge] = (held[edge][0] + grant.granted, now_s + LEASE_S)
        assert sum(count for count, _ in held.values()) <= most


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 200), st.integers(0, 100)), max_size=40),
    st.integers(10, 1000),
)
def test_tokens_of_any_span_are_bounded(asked: list[tuple[float, int, int]], per_minute: int) -> None:
    """The tokens that were generated and the last prompt may come on top."""
    counted, now_s, begun = Quotas(), 0.0, list[tuple[float, int]]()
    for later_s, prompt, spent in asked:
        now_s += later_s
        request = QuotaRequest(name="a", wanted=(prompt,), spent=spent, tokens_per_minute=per_minute)
        before = counted.ahead_s("a", now_s) + spent * MINUTE_S / per_minute
        grant = counted.ask(request, now_s)
        assert bool(grant.granted) == (grant.wait_s == 0.0)
        if grant.granted:
            assert before < MINUTE_S + 1e-6
        else:
            assert grant.wait_s == pytest.approx(before + MINUTE_S / per_minute - MINUTE_S)
        begun.append((now_s, spent + prompt * grant.granted))
    for start, (first_s, _) in enumerate(begun):
        for end in range(start, len(begun)):
            if begun[end][1]:
                earlier = sum(count for _, count in begun[start:end])
                span_s = begun[end][0] - first_s
                generated = sum(spent for _, _, spent in asked[start : end + 1])
                assert earlier - generated <= per_minute * (1 + span_s / MINUTE_S) + 200
