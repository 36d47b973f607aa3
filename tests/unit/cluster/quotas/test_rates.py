"""The rate of a key is one over all edges and routers, also while routers end."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.quotas.test_quotas import Cluster, run
from tidemill.cluster.edge.requests.api_keys import ApiKey, ApiKeys, digest_of
from tidemill.cluster.quotas.rate_client import in_order
from tidemill.cluster.quotas.rates import MINUTE_S, Rates
from tidemill.workers.messages import Overloaded

KEY = ApiKey(tenant="shop", sha256=digest_of("sk-shop"), requests_per_minute=12)
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


def test_edges_share_the_rate_of_a_key_and_keep_it_when_a_router_ends() -> None:
    async def check(cluster: Cluster) -> None:
        edges = cluster.edges
        assert await admitted(edges[:2], 3) == 6
        first, second = in_order(list(cluster.routers), KEY.sha256)
        await cluster.routers[first].stop()
        late = len(edges)  # what an edge has not seen of the others' requests, and time that passes
        assert 6 <= await admitted(edges, 8) < 6 + late, "edges tell the next router what was counted"
        await cluster.routers[second].stop()
        assert await admitted(edges, 8) <= late, "and each edge counts by itself without one"

    run(check, 3, KEY)


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
