"""A flood is refused with a time to come back; who asks, and how long they wait, reach the router."""

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    call,
    exchange,
    saying,
    serving,
    sources,
)
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX, EdgeLimits
from tidemill.cluster.listener import InFlightLimit, client_of
from tidemill.cluster.messages import Misses
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.workers.messages import Overloaded

TEXT = "/v1/completions"


def asked(headers: dict[str, str], **body: object) -> tuple[str, float | None]:
    service = FakeService(saying(" ok"))
    response = call(app_over(service), "POST", TEXT, json={"prompt": "Hello", **body}, headers=headers)
    assert response.status_code == 200, response.text
    (request,) = service.requests
    return request.tenant, request.ttft_s_max


def test_tenant_is_a_key_else_a_salt_else_none() -> None:
    assert asked({}) == ("", None)
    assert asked({}, cache_salt="team-a") == ("salt:team-a", None)
    one, _ = asked({"authorization": "Bearer sk-secret"}, cache_salt="team-a")
    assert one.startswith("key:")
    assert "secret" not in one
    assert asked({"authorization": "bearer  sk-secret "})[0] == one
    assert asked({"x-api-key": "sk-secret"})[0] == one
    assert asked({"authorization": "Bearer sk-other"})[0] != one
    assert asked({"authorization": "Basic abc"})[0] == asked({"authorization": "Bearer "})[0] == ""


@pytest.mark.parametrize(("text", "seconds"), [("2000", 2.0), ("0.5", 0.0005), ("1e3", 1.0)])
def test_deadline_comes_in_milliseconds(text: str, seconds: float) -> None:
    assert asked({"x-slo-ttft-ms": text}) == ("", pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e999"])
def test_invalid_deadlines_are_named(text: str) -> None:
    app, headers = app_over(FakeService(saying(" ok"))), {"x-slo-ttft-ms": text}
    response = call(app, "POST", TEXT, json={"prompt": "Hello"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-slo-ttft-ms"
    assert "milliseconds" in response.json()["error"]["message"]


async def flood(limits: EdgeLimits, bodies: list[dict[str, Any]]) -> tuple[list[int], list[int], int]:
    """Statuses of `bodies` while one answer stalls, of the same afterwards, and of /health while it does."""
    service = FakeService(saying(" ok"), stall_at=0)
    app = app_over(service, limits=limits)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        first = asyncio.create_task(client.post(TEXT, json={"prompt": "Hello", "n": 2}))
        await service.stalled.wait()
        during = [(await client.post(TEXT, json=body)).status_code for body in bodies]
        health = (await client.get("/health")).status_code
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await service.idle.wait()
        service.stall_at = None
        after = [(await client.post(TEXT, json=body)).status_code for body in bodies]
    return during, after, health


@pytest.mark.parametrize(
    ("limits", "bodies"),
    [
        (EdgeLimits(answers_max=3), [{"prompt": "Hello", "n": 2}, {"prompt": ["a", "b"], "stream": True}]),
        (EdgeLimits(requests_max=1), [{"prompt": "Hello"}]),
        (EdgeLimits(body_bytes_max=140), [{"prompt": "Hello " * 20}]),
    ],
    ids=["answers", "requests", "bytes"],
)
async def test_what_is_open_is_bounded_except_requests_for_status(
    limits: EdgeLimits, bodies: list[dict[str, Any]]
) -> None:
    assert await flood(limits, bodies) == ([429] * len(bodies), [200] * len(bodies), 200)


def test_greedy_client_leaves_a_whole_body_to_each_of_fourteen_others() -> None:
    limit = InFlightLimit(EdgeLimits().body_bytes_max, "bytes of bodies")
    for _ in range(14):
        limit.take(BODY_BYTES_MAX, "greedy")
    with pytest.raises(Overloaded):
        limit.take(BODY_BYTES_MAX, "greedy")
    for number in range(14):
        limit.take(BODY_BYTES_MAX, f"client {number}")
    limit.check()


def test_missed_deadlines_are_counted() -> None:
    """The clock of the fakes ticks by 1/64 s: the first token comes after one tick."""

    def missed(ttft_s_max: float, failure: Overloaded | None, **headers: str) -> tuple[Misses, float]:
        source = sources()
        metrics = EdgeMetrics(source.clock_s, {"keeper": ttft_s_max})
        service = FakeService(saying(" ok"))
        if failure is not None:
            service.fail_at, service.failure = 0, failure
        app = app_over(service, source=source, metrics=metrics)
        call(app, "POST", TEXT, json={"prompt": "Hello"}, headers=headers)
        text = call(app, "GET", "/metrics").text
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return metrics.misses("keeper"), values["tidemill:late_first_tokens_total"]

    assert missed(60.0, None) == (Misses(answered=1), 0)
    assert missed(0.001, None) == (Misses(answered=1, late=1), 1)
    assert missed(60.0, None, **{"x-slo-ttft-ms": "1"}) == (Misses(answered=1, late=1), 1)
    assert missed(0.001, None, **{"x-slo-ttft-ms": "60000"})[0].late == 1, "the server's is the longest"
    full = Overloaded("full", predicted_s=1.0, retry_after_s=1.0)
    assert missed(60.0, full) == (Misses(refused=1), 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-8, 8))), st.integers(1, 40))
def test_no_client_takes_all_and_what_is_given_back_is_free(steps: list[tuple[str, int]], most: int) -> None:
    limit = InFlightLimit(most, "things")
    held = {"a": 0, "b": 0, "c": 0}
    for client, amount in steps:
        if amount < 0:
            given = min(-amount, held[client])
            limit.give(given, client)
            held[client] -= given
        elif held[client] + amount <= most - sum(held.values()):
            limit.take(amount, client)
            held[client] += amount
        else:
            with pytest.raises(Overloaded, match="yours"):
                limit.take(amount, client)
        limit.check()
        assert limit.held == sum(held.values())


@pytest.mark.parametrize(
    ("tenant", "address", "client"),
    [
        ("search", "10.0.0.1", "tenant:search"),
        (None, "10.0.0.1", "10.0.0.1"),
        (None, "::ffff:10.0.0.1", "10.0.0.1"),
        (None, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        (None, "2001:db8:1:2::1", "2001:db8:1:2::/64"),
        (None, "testclient", "testclient"),
        (None, None, ""),
    ],
)
def test_client_is_a_tenant_or_an_address(tenant: str | None, address: str | None, client: str) -> None:
    assert client_of(tenant, address) == client


async def test_answers_of_one_tenant_leave_room_for_the_others() -> None:
    keys = [ApiKey(tenant=tenant, sha256=digest_of(tenant)) for tenant in ("a", "b")]
    service = FakeService(saying(" ok"), stall_at=0)
    limits = EdgeLimits(answers_max=8)
    app = app_over(service, limits=limits, keys=keys)

    async def ask(tenant: str, n: int) -> int:
        headers = {"authorization": f"Bearer {tenant}"}
        return (
            await exchange(app, "POST", TEXT, json={"prompt": "Hello", "n": n}, headers=headers)
        ).status_code

    first = asyncio.create_task(ask("a", 4))
    await service.stalled.wait()
    assert await ask("a", 1) == 429
    service.stall_at = None
    assert await ask("b", 2) == 200
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
