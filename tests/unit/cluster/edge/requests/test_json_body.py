"""The structure of a body is bounded before it is parsed, as Python's parser does it."""

import json
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tidemill.cluster.edge.chat.request.json_text import field_with, parse_json
from tidemill.cluster.edge.chat.request.messages import ARGUMENTS_BRACKETS_MAX, ARGUMENTS_COMMAS_MAX
from tidemill.cluster.edge.http import middleware
from tidemill.cluster.edge.requests.bodies import ChatBody
from tidemill.cluster.edge.requests.json_body import (
    CONTAINERS_MAX,
    DEPTH_MAX,
    MEMBERS_MAX,
    VALUES_MAX,
    check_json,
)
from tidemill.workers.messages import RequestError

SURROGATES = ["\ud83d", "a\udc00b", "\ud83d\ude00"]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def items(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def members(count: int) -> str:
    return "{" + ",".join(f'"{name}" : 1' for name in range(count)) + "}"


ALLOWED = [
    (nested(DEPTH_MAX), nested(DEPTH_MAX + 1)),
    (items("[]", CONTAINERS_MAX - 1), items("{}", CONTAINERS_MAX)),
    (members(MEMBERS_MAX), members(MEMBERS_MAX + 1)),
    (items("1", VALUES_MAX + 1), items("1", VALUES_MAX + 2)),
    (items('""', VALUES_MAX - 1), items('""', VALUES_MAX + 1)),
]


@pytest.mark.parametrize(("allowed", "refused"), ALLOWED)
@pytest.mark.parametrize("before", ["", r"\"", r"\\", r"\\\"", r"\\\\", '{"a": [', "]"])
def test_each_limit_is_what_it_allows_behind_any_string(allowed: str, refused: str, before: str) -> None:
    """A string in front must neither hide what follows nor be counted itself."""
    text = f'"{before}"' if before.startswith("\\") else json.dumps(before)
    check_json(f"{text} {allowed}".encode())
    with pytest.raises(RequestError) as caught:
        check_json(f"{text} {refused}".encode())
    assert caught.value.code == "body_too_complex"


@given(
    st.recursive(
        st.text() | st.integers() | st.text('\\"[]{},:'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('\\"[]{}'), inner),
    )
)
def test_ordinary_json_is_allowed(value: object) -> None:
    check_json(json.dumps([value, ["x"] * DEPTH_MAX, [[]] * DEPTH_MAX]).encode())


def test_text_of_brackets_and_quotes_is_allowed() -> None:
    check_json(json.dumps({"prompt": '[{"a\\": [' * 300_000}).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(SURROGATES),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def is_half(value: object) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def is_infinite(value: object) -> bool:
    return value in (inf, -inf) or value != value  # noqa: PLR0124 - NaN


REFUSED = {"surrogate": is_half, "finite": is_infinite}


def outcome(parse: Callable[[bytes], object], text: bytes) -> str:
    try:
        return repr(parse(text))
    except ValueError as error:
        return repr(error)


@given(JSON, st.booleans(), st.sampled_from(["", "\ufeff", " \n"]), st.sampled_from(["", "}", ",", "\x00"]))
def test_parser_does_what_pythons_does(value: object, is_ascii: bool, before: str, behind: str) -> None:  # noqa: FBT001
    text = f"{before}{json.dumps(value, ensure_ascii=is_ascii)}{behind}".encode(errors="surrogatepass")
    with suppress(ValueError):
        value = json.loads(text)
        for reason, is_refused in REFUSED.items():
            if field_with(is_refused, value) is not None:
                with pytest.raises(RequestError, match=reason):
                    parse_json(text)
                return
    assert outcome(parse_json, text) == outcome(json.loads, text)


@pytest.mark.parametrize("text", [b"9" * 4301, b'{"a":1,"a":2}', b"[1e300,-0,-0.0,1E5]", b"[01]", b"[1.]"])
def test_parser_does_what_pythons_does_with_odd_numbers_and_names(text: bytes) -> None:
    assert outcome(parse_json, text) == outcome(json.loads, text)


def test_routes_use_the_faster_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse(text: bytes) -> object:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr(middleware, "parse_json", parse)
    body = b'{"prompt": "a"}'
    app = app_over(FakeService(saying(" a")))
    for path in ("/v1/completions", "/tokenize"):
        reply = call(app, "POST", path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 200
    assert parsed == [body, body]


def posted(path: str, body: bytes) -> tuple[int, Any]:
    service = FakeService(saying(" a"))
    reply = call(app_over(service), "POST", path, content=body, headers={"content-type": "application/json"})
    assert not service.requests
    return reply.status_code, reply.json()["error"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused_because_they_could_hide_anything(encoding: str) -> None:
    status, error = posted("/v1/completions", '{"prompt": "a"}'.encode(encoding))
    assert (status, "UTF-8" in error["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "field", [members(MEMBERS_MAX + 1), nested(DEPTH_MAX), items("[]", CONTAINERS_MAX)], ids=len
)
def test_complex_bodies_are_refused_everywhere(path: str, field: str) -> None:
    status, error = posted(path, f'{{"model": "keeper", "unknown": {field}}}'.encode())
    assert (status, error["code"]) == (400, "body_too_complex")


@pytest.mark.parametrize(
    ("item", "most"), [([], ARGUMENTS_BRACKETS_MAX // 8 - 2), (1, ARGUMENTS_COMMAS_MAX // 8 + 1)]
)
def test_arguments_of_all_calls_are_bounded_together(item: object, most: int) -> None:
    """They are texts of the body, so their structure is not counted with its own."""

    def chat(items: int) -> dict[str, Any]:
        text = json.dumps({"a": [item] * items})
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
        return {"messages": [{"role": "assistant", "tool_calls": [call, call]}] * 4}

    assert ChatBody.model_validate(chat(most))
    status, error = posted("/v1/chat/completions", json.dumps(chat(most + 1)).encode())
    assert (status, error["param"]) == (400, "messages")
    assert " in arguments: send at most " in error["message"], "a long prompt is refused, too"
