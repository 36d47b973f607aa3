"""Bad input is answered with the field and the fix and never reaches the service; failures are not silent."""

import json

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, chat, events_of, post, saying
from tidemill.cluster.edge.requests.bodies import UNSUPPORTED
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.inbox import Enough
from tidemill.workers.messages import Overloaded, Poisonous, RequestError, Unserved

APP = app_over(FakeService(saying(" ok")))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello!"}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "a", "reasoning": "Hm.", "audio": None},
        {"role": "assistant", "content": None, "reasoning": {"effort": "low"}},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": None}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{" * 99}}]},
        {"role": "tool", "content": None, "tool_call_id": "c"},
        {"role": "tool", "tool_call_id": "unknown"},
        {"role": "function", "name": "f", "content": "a"},
        {"role": "developer", "content": "Be short."},
        {"role": "system", "content": "Be short."},
    ],
)
def test_old_and_worn_history_is_answered(turn: dict[str, object]) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, turn, USER]
    assert call(APP, "POST", CHAT, json={"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "f"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a'},
        {"type": "function_call_output", "call_id": "c", "output": None},
    ],
)
def test_worn_items_are_answered(item: dict[str, object]) -> None:
    assert call(APP, "POST", "/v1/responses", json={"input": [USER, item, USER]}).status_code == 200


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(500, 12), (511, None)])
def test_prompt_and_answer_fit_the_model(num_tokens: int, max_tokens: int | None) -> None:
    for more, status in ((0, 200), (1, 400)):
        reply = post(APP, TEXT, {"prompt": [5] * (num_tokens + more), "max_tokens": max_tokens})
        assert reply.status_code == status
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_unsupported_fields_that_change_the_answer_are_refused_by_name(field: str) -> None:
    service = FakeService(saying(" ok"))
    app = app_over(service)
    error = chat(app, **{field: {"of": "some kind"}}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert not service.requests
    for harmless in (*UNSUPPORTED[field], None):
        assert chat(app, **{field: harmless}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "a", "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
    ],
)
def test_broken_json_is_the_clients_error(content: bytes) -> None:
    response = post(APP, TEXT, content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", "9" * 400 + ".0"])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"])
def test_number_that_no_reply_can_repeat_is_refused_before_it_is_answered(path: str, number: str) -> None:
    service = FakeService(saying("a"))
    content = f'{{"model": "keeper", "tools": [{{"parameters": {{"a": [1, {{"b": {number}}}]}}}}]}}'.encode()
    response = post(app_over(service), path, content)
    assert response.status_code == 400
    field = "tools[0].parameters.a[1].b"
    assert response.json()["error"].get("param", field) == field, "errors of Anthropic's API have no param"
    assert f"{field} holds NaN or a number beyond 1.8e308: send finite" in response.text
    assert service.requests == []


def test_body_is_json_by_its_type() -> None:
    response = post(APP, TEXT, b'{"prompt": "a"}', **{"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("written", "param"),
    [
        (r'{"prompt": "\ud800"}', "prompt"),
        (r'{"prompt": "\uDFFF\ud800"}', "prompt"),
        (r'{"prompt": "a", "\udc00": 1}', None),
        (r'{"prompt": "a", "user": {"a": [0, {"b\ud83d": 1}]}}', "user.a[1]"),
        (r'{"prompt": "a", "structured_outputs": {"\ud800": 1}}', "structured_outputs"),
        (r'{"prompt": "a", "metadata": {"a": "\ud83d"}}', "metadata.a"),
        ('{"prompt": "a", "user": "\ud800"}', "user"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/detokenize"])
def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(
    path: str, written: str, param: str | None
) -> None:
    response = post(APP, path, written.encode(errors="surrogatepass"))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param or 'the body'} holds half of a surrogate pair: send valid Unicode"


def test_pairs_and_escaped_backslashes_are_no_half_pairs() -> None:
    assert post(APP, TEXT, rb'{"prompt": "\ud83d\ude00 \\ud800"}').status_code == 200


def test_reply_can_be_sent_whatever_it_repeats() -> None:
    broken = app_over(FakeService(saying("a"), fail_at=0, failure=RequestError("no \ud800", param="\udc00")))
    error = chat(broken).json()["error"]
    assert (error["message"], error["param"]) == ("no \ud800", "\udc00")


@pytest.mark.parametrize("size", [BODY_BYTES_MAX, BODY_BYTES_MAX + 1])
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_body_of_bounded_size(size: int, length: str) -> None:
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    body = body[:-2] + b"x" * (size - len(body)) + body[-2:]

    async def parts():  # noqa: ANN202 - httpx's own type for it is private
        yield body[: size // 2]
        yield body[size // 2 :]

    content = body if length == "known" else parts()
    response = call(APP, "POST", TEXT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == (200 if size <= BODY_BYTES_MAX else 413)
    if response.status_code == 413:
        assert response.json()["error"]["code"] == "body_too_large"


def test_unknown_paths_and_methods() -> None:
    for method, path, status in (("GET", "/v2/x", 404), ("GET", TEXT, 405), ("DELETE", "/v1/models", 405)):
        response = call(APP, method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


AGAIN = "the request could not be served now, try again: "
UNFIT = RequestError("schema: x is not supported", param="response_format", code="unfit")
FULL = Overloaded("it would take 70 s", predicted_s=70.0, retry_after_s=10.2)
FAILURES: list[tuple[TidemillError, int, str | None, tuple[str, str, str | None, str]]] = [
    (Unserved("no worker"), 503, "1", (f"{AGAIN}no worker", "server_error", None, "unserved")),
    (UNFIT, 400, None, ("schema: x is not supported", "invalid_request_error", "response_format", "unfit")),
    (FULL, 429, "11", ("it would take 70 s", "rate_limit_error", None, "overloaded")),  # and not too early
    (Poisonous("it ended two"), 500, None, ("it ended two", "server_error", None, "poisonous")),
]


@pytest.mark.parametrize(("failure", "status", "retry_after", "error"), FAILURES)
@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("choices", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_failure_is_a_status_before_the_first_message_and_an_event_after_it(
    failure: TidemillError,
    status: int,
    retry_after: str | None,
    error: tuple[str, str, str | None, str],
    fail_at: int,
    choices: int,
    *,
    stream: bool,
) -> None:
    """Grammars are read by workers, so what is wrong with them comes back through the data plane."""
    service = FakeService(saying(" Emma is here"), fail_at=fail_at, failure=failure)
    response = chat(app_over(service), stream=stream, n=choices)
    if stream and fail_at:
        assert response.status_code == 200
        assert "event: error\n" in response.text
        *chunks, last = events_of(response)
        assert choices > 1 or len(chunks) == 1 + fail_at, "the opening, and a chunk for each piece"
    else:
        assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
        last = response.json()
    assert last["error"] == dict(zip(("message", "type", "param", "code"), error, strict=True))
    assert service.open_streams == 0


def test_answer_that_just_ends_is_a_failure() -> None:
    app = app_over(FakeService(saying(" Emma is here"), fail_at=1, failure=Enough()))
    assert chat(app).status_code == 503
    assert events_of(chat(app, stream=True))[-1]["error"]["code"] == "unserved"
