"""POST and DELETE /v1/prefixes: a prompt is computed and retained, and nothing is answered to it."""

from typing import Any

import pytest
from httpx import Response

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    build_app,
    call,
    chat,
    saying,
    sources,
    tokenizer,
)
from tidemill.cluster.edge.chat.request.params import session_of
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.models import ServedBackend

MESSAGES = [{"role": "system", "content": "Be kind."}]
PREFIXES = "/v1/prefixes"


def post(service: FakeService, **body: Any) -> Response:  # noqa: ANN401
    return call(app_over(service), "POST", PREFIXES, json=body)


def retained(service: FakeService, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    reply = post(service, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("body", [{"messages": MESSAGES}, {"prompt": "Be kind."}, {"prompt": [5, 6, 7]}])
def test_prefix_is_computed_and_retained(body: dict[str, Any]) -> None:
    service = FakeService(saying("a"))
    reply = retained(service, **body, retain=60)
    (request,) = service.requests
    assert reply == {
        "id": reply["id"],
        "object": "prefix",
        "model": "keeper",
        "tokens": len(request.tokens),
        "cached_tokens": max(0, len(request.tokens) - 5),  # by the trace of the fake
        "retain": 60,
        "expires_at": 1_700_000_183,
    }
    assert request.max_new_tokens == 1
    assert request.retain_s == 60
    assert request.session == session_of("", "prefix", reply["id"])


def test_prefix_of_a_chat_is_the_beginning_of_chats() -> None:
    service = FakeService(saying("a"))
    retained(service, messages=MESSAGES)
    chat(app_over(service), messages=[*MESSAGES, {"role": "user", "content": "Where is Emma?"}])
    prefix, whole = service.requests
    assert whole.tokens[: len(prefix.tokens)] == prefix.tokens


def test_same_prefix_has_one_id() -> None:
    service = FakeService(saying("a"))
    chats: list[dict[str, Any]] = [{}, {"retain": 9, "priority": 3}, {"cache_salt": "a"}]
    ids = [retained(service, messages=MESSAGES, **more)["id"] for more in chats]
    ids.append(retained(service, prompt="Be kind.")["id"])
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_fields_of_answers_are_named() -> None:
    fields: dict[str, Any] = {"temperature": 1, "stream": True, "session_id": "s", "speed": 9}
    reply = post(FakeService(saying("a")), prompt="a", **fields)
    assert reply.status_code == 200
    assert set(reply.headers["x-tidemill-ignored"].split(", ")) == fields.keys()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": "a", "messages": MESSAGES}, None),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": "a", "retain": 0}, "retain"),
        ({"prompt": "a", "retain": 3601}, "retain"),
        ({"prompt": "a", "cache_breakpoints": [2]}, "cache_breakpoints"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({"prompt": "a " * 600}, "prompt"),
    ],
)
def test_bad_prefix_is_refused(body: dict[str, Any], param: str | None) -> None:
    service = FakeService(saying("a"))
    reply = post(service, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (404 if param == "model" else 400, param)
    assert not service.requests


def test_deleted_prefix_is_released_by_its_tenant_alone() -> None:
    """It is a request like others: its tokens are counted, and without keys a salt names its tenant."""
    keys = [ApiKey(tenant=name, sha256=digest_of(f"key-{name}")) for name in ("a", "b")]
    service = FakeService(saying("a"))
    app = build_app([ServedBackend(service, tokenizer())], sources(), keys=keys)
    mine = {"authorization": "Bearer key-a"}
    made = call(app, "POST", PREFIXES, json={"prompt": "a b c"}, headers=mine).json()
    for headers in (mine, {"authorization": "Bearer key-b"}):
        reply = call(app, "DELETE", f"{PREFIXES}/{made['id']}", headers=headers)
        assert reply.json() == {"id": made["id"], "object": "prefix", "deleted": True}
    assert call(app, "DELETE", f"{PREFIXES}/{made['id']}").status_code == 401
    counted = f'tidemill:prompt_tokens_total{{model_name="keeper"}} {float(made["tokens"])}'
    assert counted in call(app, "GET", "/metrics").text
    salted = retained(service, prompt="a", cache_salt="s")["id"]
    call(app_over(service), "DELETE", f"{PREFIXES}/{salted}?cache_salt=s")
    first, last = [(request.tenant, request.session) for request in service.requests]
    assert (service.orders[0], service.orders[2]) == (first, last)
    assert service.orders[1] != first
