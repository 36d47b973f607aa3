"""GET /cluster/requests: which way the latest requests took, and how they ended."""

import weakref
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import FakeService, app_over, call, chat, complete, saying, serving
from tidemill.cluster.edge.chat.output.detokenizer import Ending
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.recent_requests import RecentRequests, RequestIdentity
from tidemill.workers.messages import Request


def rows_of(app: FastAPI, query: str = "") -> list[dict[str, Any]]:
    reply = call(app, "GET", f"/cluster/requests{query}")
    assert reply.status_code == 200, reply.text
    return reply.json()["requests"]


class FollowedJob(PreparedRequest):
    """A job that records when it is freed."""


def job() -> PreparedRequest:
    requests = (Request(request_id="r", tokens=(5, 6), max_new_tokens=3),)
    return FollowedJob(requests=requests, n=1, best_of=1, ending=Ending(), logprobs=False)


def asked(number: int) -> RequestIdentity:
    return RequestIdentity(request_id=f"x{number}", reply_id=f"cmpl-{number}", model="keeper", kind="text")


def test_row_has_the_route_and_no_text() -> None:
    app = app_over(FakeService(saying(" a b c")))
    ended = complete(app, prompt="the lighthouse at night")
    (row,) = rows_of(app)
    assert row["id"] == ended["id"]
    assert (row["model"], row["kind"], row["choices"]) == ("keeper", "text", 1)
    assert (row["prefill"], row["decode"], row["attempts"]) == ("prefill-0.b", "decode-0.a", 1)
    assert row["prefill_depth"] == 5
    times = {"waited_s", "fetched_s", "computed_s", "stored_s"}
    assert set(row["prefill_times"]) == set(row["decode_times"]) == times
    usage = ("prompt_tokens", "completion_tokens", "prompt_tokens_details")
    assert {name: row[name] for name in usage} == {name: ended["usage"][name] for name in usage}
    assert (row["finish"], row["error"]) == ("stop", None)
    assert 0 < row["ttft_s"] < row["e2e_s"]
    assert row["tokens_per_s"] > 0
    assert row["started_unix_s"] == 1_700_000_123.5
    assert "lighthouse" not in str(row)


def test_it_is_found_by_the_id_of_the_request() -> None:
    app = app_over(FakeService(saying(" a")))
    replies = [
        call(app, "POST", "/v1/completions", json={"prompt": "a"}, headers=headers)
        for headers in ({"x-request-id": "mine"}, {})
    ]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert ids[0] == "mine"
    assert [row["request_id"] for row in rows_of(app)] == ids[::-1]


def test_request_is_read_by_its_id_or_that_of_its_answer() -> None:
    app = app_over(FakeService(saying(" a")))
    ended = call(app, "POST", "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "a/b c"})
    for name in ("a%2Fb%20c", ended.json()["id"]):
        row = call(app, "GET", f"/cluster/requests/{name}").json()
        assert row["request_id"] == "a/b c"
        (found,) = row["cache_diagnostics"]
        assert row["cache_reason"] == found["reason"] == "other_text"
        assert row["cache_missed_tokens"] == found["cache_missed_tokens"] == 4
        assert [miss["worker"] for miss in found["misses"]] == ["prefill-0.b", "decode-0.a"]
    assert call(app, "GET", "/cluster/requests/b").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
def test_diagnostics_are_in_every_usage_that_asks_for_them(path: str, body: dict[str, Any]) -> None:
    app = app_over(FakeService(saying(" a")))

    def usage_of(**headers: str) -> dict[str, Any]:
        reply = call(app, "POST", path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        return usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage

    assert "cache_diagnostics" not in usage_of()
    for asked in ("on", "Text"):
        (found,) = usage_of(**{"x-cache-diagnostics": asked})["cache_diagnostics"]
        assert found["misses"][0]["differs_at"] == [2, 2]
        assert ("text" in found["misses"][0]) is (asked == "Text")
    refused = call(app, "POST", path, json=body, headers={"x-cache-diagnostics": "yes"})
    assert (refused.status_code, "on and text" in refused.text) == (400, True)
    assert not any("text" in row["cache_diagnostics"][0]["misses"][0] for row in rows_of(app))


async def test_open_request_has_no_end_until_its_client_disconnects() -> None:
    service = FakeService(saying(" a b c"), stall_at=1)

    async with serving(app_over(service)) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "a", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body):
            await service.stalled.wait()
            (row,) = (await client.get("/cluster/requests")).json()["requests"]
            assert (row["finish"], row["e2e_s"], row["decode"]) == (None, None, "decode-0.a")
        await service.idle.wait()
        while row["finish"] is None:
            (row,) = (await client.get("/cluster/requests")).json()["requests"]
        assert (row["finish"], row["error"]) == ("abort", None)


@pytest.mark.parametrize(
    ("body", "fail_at", "ends"),
    [
        ({"n": 3, "max_tokens": 2}, None, [("length", None, 3, 6)]),
        ({}, 1, [("error", "Unserved", 1, 1)]),
        ({"temperature": -1}, None, []),
    ],
    ids=["choices", "failed", "refused"],
)
def test_requests_are_rows_with_their_ends(
    body: dict[str, Any], fail_at: int | None, ends: list[tuple[Any, ...]]
) -> None:
    app = app_over(FakeService(saying(" a b", eos=False), fail_at=fail_at))
    chat(app, **body)
    columns = ("finish", "error", "choices", "completion_tokens")
    assert [tuple(row[name] for name in columns) for row in rows_of(app)] == ends


@pytest.mark.parametrize("limit", [0, 201, "x", -1])
def test_limits_are_checked(limit: object) -> None:
    app = app_over(FakeService(saying(" a")))
    assert call(app, "GET", f"/cluster/requests?limit={limit}").status_code == 400


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_newest_are_kept_and_nothing_of_their_prompts(ends: list[bool], size: int) -> None:
    """They may end in any order, also when they are no longer in the ring."""
    ended: list[object] = []
    recent = RecentRequests(lambda: 0.0, lambda: 0.0, size, lambda row, _: ended.append(row["request_id"]))
    jobs: list[weakref.ref[PreparedRequest]] = []
    running: list[Any] = []
    for number, ends_at_once in enumerate(ends):
        one = job()
        jobs.append(weakref.ref(one))
        watch = recent.watch(asked(number), one)
        del one
        watch.__enter__()
        if ends_at_once:
            watch.__exit__(None, None, None)
        else:
            running.append(watch)
        rows = recent.rows()
        assert [row["request_id"] for row in rows] == [f"x{count}" for count in range(number, -1, -1)][:size]
    for watch in running:
        watch.__exit__(None, None, None)
    running.clear()
    watch = None
    assert all(row["finish"] == "abort" for row in recent.rows())
    assert {*ended} == {f"x{number}" for number in range(len(ends))}
    assert not any(task() for task in jobs)
