"""Hints as clients send them: each row of the table in docs/api.md, how hints come together, and prefixes."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from httpx import Response

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    call,
    chat,
    events_of,
    post,
    saying,
    tokenizer,
)
from tidemill.cluster.cli.serve import endpoint_of
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.edge.chat.request import hints as hints_module
from tidemill.cluster.edge.chat.request.params import session_of
from tidemill.cluster.edge.chat.tokenizer import text_of
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.settings import HostedTools
from tidemill.workers.messages import RETAIN_S_MAX, Request

API = Path(__file__).parents[5] / "docs" / "api.md"
IGNORED = "x-tidemill-ignored"
TEXT = "Where is Emma? She is in the tower."
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
    "/v1/completions": {"prompt": TEXT},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
}
CHATS = "/v1/chat/completions"
MARK = {"type": "ephemeral"}
HOUR = {**MARK, "ttl": "1h"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


class Row(NamedTuple):
    field: str
    value: Any
    verdict: str


def rows() -> list[Row]:
    section = API.read_text().split("## Hints")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([^`]+)` \| `([^|]+)` \| (\w+) \|", section, re.MULTILINE)
    return [Row(field, json.loads(value), verdict) for field, value, verdict in found]


def body_with(path: str, row: Row) -> dict[str, Any] | None:
    """Return a body of this endpoint with the row's field; None if it has no such field."""
    body = json.loads(json.dumps(ENDPOINTS[path]))
    match row.field.split("."):
        case ["messages[]", "content[]", "cache_control"]:
            turns = body.get("messages") or body.get("input")
            if turns is None:
                return None
            turns[0]["content"][0]["cache_control"] = row.value
        case ["tools[]", "cache_control"]:
            if path == "/v1/completions":
                return None
            body["tools"] = [{**(TOOL if path == CHATS else FLAT_TOOL), "cache_control": row.value}]
        case ["cache_breakpoints"]:
            if path != "/v1/completions":
                return None
            body["cache_breakpoints"] = row.value
        case parts:
            *parents, name = parts
            inner = body
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[name] = row.value
    return body


def sent(
    path: str,
    body: dict[str, Any],
    *,
    stream: bool = False,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, Request | None, Response, list[str]]:
    """Send a body; return the status, the request of the service without its id, the reply, and what was
    ignored."""
    service = FakeService(saying(" In the tower."))
    reply = post(app_over(service), path, {**body, "stream": stream}, **headers)
    ignored = reply.headers.get(IGNORED, "")
    request = replace(service.requests[0], request_id="") if service.requests else None
    return reply.status_code, request, reply, ignored.split(", ") if ignored else []


def test_table_has_each_verdict() -> None:
    verdicts = [row.verdict for row in rows()]
    assert set(verdicts) == {"accepted", "ignored", "refused"}
    assert len(verdicts) >= 30


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.field)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_field_does_what_its_row_states(path: str, row: Row) -> None:
    body = body_with(path, row)
    if body is None:
        pytest.skip("the endpoint has no such field")
    unmarked = [{**tool, "cache_control": None} for tool in body.get("tools", [])]
    bare = {**ENDPOINTS[path], **({"tools": unmarked} if unmarked else {})}
    status, request, reply, ignored = sent(path, body)
    _, without, _, _ = sent(path, bare)
    match row.verdict:
        case "accepted":
            assert (status, ignored) == (200, [])
            assert request != without, "it has an effect"
        case "ignored":
            assert (status, ignored) == (200, [row.field])
            assert request == without
        case _:
            assert (status, request) == (400, None)
            assert reply.json()["error"]["param"] == row.field


HINTS: list[tuple[dict[str, Any], float]] = [
    ({}, 0),
    ({"session_id": "s"}, 300),
    ({"prompt_cache_key": "s"}, 300),
    ({"session_id": "s", "cache_control": HOUR}, 3600),
    ({"cache_control": MARK, "nvext": {"cache_control": HOUR}}, 3600),
    ({"prompt_cache_retention": "in_memory"}, 300),
    ({"retain": 20, "session_id": "s"}, 20),
    ({"retain": 20, "cache_control": MARK}, 300),
    ({"prompt_cache_retention": "24h", "cache_control": MARK}, RETAIN_S_MAX),
    ({"session_id": None, "cache_control": None, "nvext": None}, 0),
]


def request_of(body: dict[str, Any]) -> Request:
    request = sent(CHATS, body)[1]
    assert request is not None
    return request


@pytest.mark.parametrize(("hints", "retain_s"), HINTS)
def test_longest_time_counts(hints: dict[str, Any], retain_s: float) -> None:
    assert request_of({**ENDPOINTS[CHATS], **hints}).retain_s == retain_s


def test_sessions_of_tenants_and_kinds_differ() -> None:
    asked: list[dict[str, Any]] = [
        {"session_id": "s"},
        {"session_id": "s"},
        {"prompt_cache_key": "s"},
        {"session_id": "t"},
        {"session_id": "s", "cache_salt": "else"},
    ]
    sessions = [request_of({**ENDPOINTS[CHATS], **hints}).session for hints in asked]
    assert sessions[0] == sessions[1]
    assert len({*sessions}) == 4
    assert "s" not in sessions


OF_BODY = {"session_id": "body"}
CLAUDE = {"x-claude-code-session-id": "c"}
KEY = {"authorization": "Bearer key"}
SESSIONS: list[tuple[dict[str, Any], dict[str, str], dict[str, Any], float]] = [
    ({}, {"X-Session-ID": "a"}, {"session_id": "a"}, 300),
    ({}, {"session-id": "b"}, {"session_id": "b"}, 300),
    ({}, {"X-Claude-Code-Session-Id": "c"}, {"session_id": "c"}, 300),
    ({}, {**CLAUDE, "session-id": "b", "x-session-id": "a"}, {"session_id": "a"}, 300),
    ({}, {**CLAUDE, "session-id": "b"}, {"session_id": "b"}, 300),
    ({}, {**CLAUDE, "x-session-id": "a" * 257}, {"session_id": "c"}, 300),
    ({}, {"x-session-id": "a" * 257}, {}, 0),
    ({}, {"x-session-id": ""}, {}, 0),
    (OF_BODY, CLAUDE, OF_BODY, 300),
    ({"prompt_cache_key": "body"}, CLAUDE, {"prompt_cache_key": "body"}, 300),
    ({"cache_control": HOUR}, CLAUDE, {"session_id": "c"}, 3600),
    ({"retain": 20}, CLAUDE, {"session_id": "c"}, 20),
]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("hints", "headers", "same", "retain_s"), SESSIONS)
def test_header_names_a_session(
    path: str, hints: dict[str, Any], headers: dict[str, str], same: dict[str, Any], retain_s: float
) -> None:
    """The request is that of the body with the same session; with a key it is another tenant's."""
    for key in ({}, KEY):
        _, request, _, ignored = sent(path, {**ENDPOINTS[path], **hints}, headers={**headers, **key})
        _, named, _, _ = sent(path, {**ENDPOINTS[path], **same}, headers=key)
        assert request is not None
        assert named is not None
        assert (request.session, request.retain_s, ignored) == (named.session, retain_s, [])
    _, other, _, _ = sent(path, {**ENDPOINTS[path], **hints}, headers=headers)
    assert other is not None
    assert not request.session or request.session != other.session


def test_marks_come_before_the_breakpoints_that_the_edge_finds() -> None:
    """A part ends inside of a message, and a request has at most four breakpoints."""
    marked = [{"type": "text", "text": text, "cache_control": MARK} for text in ("Be", " kind")]
    parts = [*marked, {"type": "text", "text": "."}]
    question = {"role": "user", "content": "Where is Emma?"}
    request = request_of({"messages": [{"role": "system", "content": parts}, question]})
    prefixes = [text_of(tokenizer(), request.tokens[:depth]) for depth in request.breakpoints]
    assert len(prefixes) == 4
    assert prefixes[0].endswith("Be")
    assert prefixes[1].endswith("Be kind")
    without = request_of({"messages": [{"role": "system", "content": "Be kind."}, question]})
    assert without.tokens == request.tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_ignored_fields_are_named_in_streams_and_bounded(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stream: bool,
) -> None:
    """A body of 32,000 unknown fields holds the loop for those in the header alone."""
    written: list[str] = []
    printable = hints_module.printable

    def counted(name: str) -> str:
        written.append(name)
        return printable(name)

    monkeypatch.setattr(hints_module, "printable", counted)
    fields = {f"field\r\n, {number}" + "x" * 99: 1 for number in range(99)}
    status, _, reply, ignored = sent(path, {**ENDPOINTS[path], **fields}, stream=stream)
    assert status == 200
    assert len(ignored) == len(written) == hints_module.IGNORED_NAMES_MAX == 32
    assert ignored[0].startswith("field%0D%0A%2C%200xx")
    assert max(map(len, ignored)) < 200
    assert not stream or events_of(reply)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_type_of_a_tool_is_named_as_a_header_can_hold_it(path: str) -> None:
    asked = {"input": "a"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "a"}]}
    _, _, _, ignored = sent(path, {"max_tokens": 3, "tools": [{"type": "\u65e5\r\na: b"}], **asked})
    assert "tools.%E6%97%A5%0D%0Aa%3A%20b" in ignored


def test_urgency_of_dynamo_is_a_priority_class() -> None:
    for hints, priority in (
        ({"nvext": {"agent_hints": {"priority": 5}}}, -5),
        ({"nvext": {"agent_hints": {"priority": -500}}}, 100),
        ({"nvext": {"agent_hints": {"priority": 5}}, "priority": 0}, 0),
    ):
        _, request, _, ignored = sent(CHATS, {**ENDPOINTS[CHATS], **hints})
        assert request is not None
        assert request.priority == priority
        assert ignored == (["nvext.agent_hints.priority"] if "priority" in hints else [])


HELLO = [{"role": "user", "content": "Hello!"}]
OWN = {"name": "look", "input_schema": {"type": "object"}}
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/messages": (
        {"messages": HELLO, "tools": [OWN, {"type": "web_search_20250305", "name": "web_search"}]},
        "web_search_20250305",
    ),
    "/v1/responses": (
        {"input": "Hello!", "tools": [FLAT_TOOL, {"type": "web_search"}, {"type": "mcp"}]},
        "web_search",
    ),
}


def answered(path: str, body: dict[str, Any], policy: HostedTools) -> Response:
    limits = EdgeLimits(hosted_tools=policy)
    return post(app_over(FakeService(saying("a")), limits=limits), path, body)


@pytest.mark.parametrize("path", BODIES)
def test_hosted_tools_are_left_out_or_refused(path: str) -> None:
    body, kind = BODIES[path]
    ignored = answered(path, body, "ignore")
    assert ignored.status_code == 200
    assert ignored.headers["x-tidemill-ignored"].split(", ")[0] == f"tools.{kind}"
    refused = answered(path, body, "refuse")
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith(f"tools: '{kind}' does not run on this server")
    own = body | {"tools": body["tools"][:1]}
    assert answered(path, own, "refuse").status_code == 200, "tools of the client are no others"


def test_option_reaches_the_edge() -> None:
    config = RootConfig.model_validate({"models": [{"model": "keeper"}], "edge": {"hosted_tools": "refuse"}})
    assert endpoint_of(config, None, {}).limits.hosted_tools == "refuse"


MESSAGES = [{"role": "system", "content": "Be kind."}]
PREFIXES = "/v1/prefixes"


def retained(service: FakeService, **body: object) -> dict[str, Any]:
    reply = post(app_over(service), PREFIXES, body)
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
    reply = post(app_over(FakeService(saying("a"))), PREFIXES, {"prompt": "a", **fields})
    assert reply.status_code == 200
    assert set(reply.headers["x-tidemill-ignored"].split(", ")) == fields.keys()


def test_deleted_prefix_is_released_by_its_tenant_alone() -> None:
    """It is a request like others: its tokens are counted, and without keys a salt names its tenant."""
    keys = [ApiKey(tenant=name, sha256=digest_of(f"key-{name}")) for name in ("a", "b")]
    service = FakeService(saying("a"))
    app = app_over(service, keys=keys)
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
