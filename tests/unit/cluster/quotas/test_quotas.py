"""Answers, tokens and rates of a key count over all edges; a process that ends keeps and blocks none."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.sockets import free_port
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys, digest_of
from tidemill.cluster.quotas import edge_quotas, router_quotas
from tidemill.cluster.quotas.edge_quotas import LimitReached
from tidemill.cluster.quotas.rate_client import RouterRates, in_order
from tidemill.cluster.quotas.rates import MINUTE_S, Rates
from tidemill.cluster.quotas.router_quotas import LEASE_S, QuotaRequest, Quotas
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.workers.messages import Overloaded

pytestmark = IN_GRPC_LOOP

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


async def test_open_answers_are_counted_over_all_edges_until_they_end() -> None:
    async with running(3, KEY) as cluster:
        one, two, three = cluster.edges
        for _ in range(20):  # the end is known before the next one may ask anywhere
            async with one.answering(KEY, 1), two.answering(KEY, 1):
                refused = await refusal(three, KEY)
                assert refused is not None
                assert (refused.limit, refused.retry_after_s) == (None, router_quotas.RETRY_S)
                assert await refusal(one, KEY) is not None
            for edge in cluster.edges:
                assert await refusal(edge, KEY) is None


async def test_burst_is_granted_up_to_the_limit_and_clients_that_leave_hold_nothing() -> None:
    async with running(2, KEY) as cluster:
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


async def test_killed_edge_and_dead_routers_block_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_quotas, "RENEW_S", 0.1)
    monkeypatch.setattr(router_quotas, "LEASE_S", 0.5)
    async with running(2, KEY) as cluster:
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


async def test_tokens_of_all_edges_are_counted_and_a_router_that_ends_loses_none_of_the_edge_that_asks() -> (
    None
):
    async with running(2, RATED) as cluster:
        one, two = cluster.edges
        time_s = asyncio.get_running_loop().time
        began_s = time_s()
        async with one.answering(RATED, 100) as answer:
            assert answer is not None
            answer.generated = lambda: 450
        assert await refusal(two, RATED, 160) is None, "it has tokens left, and may take more than these"
        refused = await refusal(two, RATED)
        assert refused is not None
        assert (refused.limit, refused.most) == ("tokens", 600)
        full_s = 111 * MINUTE_S / 600  # without the tokens that came back meanwhile
        assert full_s - (time_s() - began_s) - 0.01 <= refused.retry_after_s <= full_s
        await cluster.first(RATED).stop()
        assert await refusal(two, RATED) is not None, "the edge tells the next router"
        for router in cluster.routers.values():
            await router.stop()
        assert await refusal(two, RATED) is not None, "and knows it without one"


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
        before = counted.rates.ahead_s("a", now_s) + spent * MINUTE_S / per_minute
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


RATE_KEY = ApiKey(tenant="shop", sha256=digest_of("sk-shop"), requests_per_minute=12)
HEADERS = {"authorization": "Bearer sk-shop"}
PATH = "/v1/chat/completions"


async def admitted(edges: list[ApiKeys], asked: int) -> int:
    """The number of requests that edges admit, each of which gets `asked` of them."""
    count = 0
    for edge in edges * asked:
        try:
            await edge.admit(PATH, HEADERS)
        except Overloaded:
            continue
        count += 1
    return count


async def test_edges_share_the_rate_of_a_key_and_keep_it_when_a_router_ends() -> None:
    async with running(3, RATE_KEY) as cluster:
        edges = cluster.edges
        assert await admitted(edges[:2], 3) == 6
        first, second = in_order(list(cluster.routers), RATE_KEY.sha256)
        await cluster.routers[first].stop()
        late = len(edges)  # what an edge has not seen of the others' requests, and time that passes
        assert 6 <= await admitted(edges, 8) < 6 + late, "edges tell the next router what was counted"
        await cluster.routers[second].stop()
        assert await admitted(edges, 8) <= late, "and each edge counts by itself without one"


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 90))
def test_rate_is_never_exceeded_over_any_span(waits_s: list[float], per_minute: int) -> None:
    rates, now_s, counted_s = Rates(), 0.0, list[float]()
    for wait_s in waits_s:
        now_s += wait_s
        if not rates.count("a", per_minute, now_s).wait_s:
            counted_s.append(now_s)
    for start, first_s in enumerate(counted_s):
        for end in range(start, len(counted_s)):
            most = per_minute + (counted_s[end] - first_s) * per_minute / MINUTE_S
            assert end - start + 1 <= most + 1e-6


def test_names_spread_over_routers_and_move_only_with_theirs() -> None:
    routers = [f"10.0.0.{host}:1" for host in range(4)]
    names = [str(name) for name in range(200)]
    firsts = {name: in_order(routers, name)[0] for name in names}
    assert set(firsts.values()) == set(routers)
    for name, first in firsts.items():
        assert in_order(routers[::-1], name)[0] == first
        if first != routers[0]:
            assert in_order(routers[1:], name)[0] == first
