"""Bad input is answered with the field and the fix and never reaches the service; failures are not silent."""

import json
from contextlib import suppress
from functools import partial

import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, chat, events_of, saying
from tidemill.cluster.edge.requests.bodies import UNSUPPORTED
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.inbox import Emit, Enough
from tidemill.workers.messages import Overloaded, Poisonous, Request, RequestError, StreamPiece, Unserved

SERVICE = FakeService(saying(" ok"))
APP = app_over(SERVICE)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello!"}


def refused(path: str, body: object) -> tuple[int, dict[str, str | None]]:
    """Status and error of a reply that must be an OpenAI-shaped error, with nothing sent to the service."""
    before = len(SERVICE.requests)
    response = call(APP, "POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert len(SERVICE.requests) == before
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return response.status_code, error


NAN = float("nan")
BAD_VALUES: dict[str, list[object]] = {
    "temperature": ["warm", 2.1, NAN, True],
    "top_p": [0, float("inf")],
    "top_k": [-2],
    "min_p": [1.5],
    "max_tokens": [0, 10**300, 2.5],
    "seed": [1 << 63],
    "n": [17, 0],
    "stop": [["1"] * 65, 7],
    "stop_token_ids": [[896]],
    "logprobs": [21, -1, True],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0, 1e9],
    "logit_bias": [
        *({token: 1} for token in ("896", "-1", "5.0", "\u0665")),
        *({"5": bias} for bias in (100.5, True)),
        {str(token): 1 for token in range(1025)},
        [5],
    ],
    "bad_words": ["a", ["a"] * 129],
    "truncate_prompt_tokens": [-2, 512],
    "truncation_side": ["middle"],
    "min_tokens": [512, -1],
    "priority": [101, 0.5],
    "include_stop_str_in_output": [1],
    "response_format": ["json_object"],
    "guided_json": [[1]],
    "stream": ["yes"],
    "cache_salt": ["a b", "a\n"],
    "cache_breakpoints": [[2]],
    "prompt": [
        "",
        [],
        [[5], []],
        [5, 896],
        [-1],
        [5, True],
        [5, "a"],
        {"text": "a"},
        ["a"] * 65,
        "\ud800",
        None,
    ],
}
BAD_BODIES: list[tuple[dict[str, object], str]] = [
    *(({"prompt": "a", field: value}, field) for field, values in BAD_VALUES.items() for value in values),
    ({}, "prompt"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "prompt"),
    ({"prompt": ["a"] * 20, "n": 16}, "n"),
    ({"prompt": "a", "stop": "é" * 129}, "stop[0]"),
    ({"prompt": "a", "stop": ["\ud800"]}, "stop[0]"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words[0]"),
    ({"prompt": "a", "bad_words": ["a" * 257]}, "bad_words[0]"),
    ({"prompt": "a", "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs.regex"),
    ({"prompt": "a", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"prompt": "a", "structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": [[5, 6], [5]], "cache_breakpoints": [2]}, "cache_breakpoints"),
    ({"prompt": "a", "cache_breakpoints": [0]}, "cache_breakpoints[0]"),
    ({"prompt": "abcde", "cache_breakpoints": [1, 2, 3, 4, 5]}, "cache_breakpoints"),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
def test_bad_completion_field_is_named(body: dict[str, object], param: str) -> None:
    status, error = refused(TEXT, body)
    assert (status, error["param"]) == (400, param)
    assert param in str(error["message"])


BAD_MESSAGES: list[tuple[object, str]] = [
    ([], "messages"),
    ("Hello!", "messages"),
    ([{"role": "narrator", "content": "a"}], "messages[0].role"),
    ([USER, {"role": "user"}], "messages[1].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "messages[0].content[0].text"),
    ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].content"),
]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        *(({"messages": messages}, param) for messages, param in BAD_MESSAGES),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 3, "max_tokens": 9, "min_tokens": 5}, "min_tokens"),
    ],
)
def test_bad_field_of_a_chat_is_named(field: dict[str, object], param: str) -> None:
    status, error = refused(CHAT, {"messages": [USER], **field})
    assert (status, error["param"]) == (400, param)


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


def test_unknown_model_is_not_found() -> None:
    status, error = refused(CHAT, {"model": "gpt-4", "messages": [USER]})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'keeper'" in str(error["message"])


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(500, 12), (511, None)])
def test_prompt_and_answer_fit_the_model(num_tokens: int, max_tokens: int | None) -> None:
    fitting = {"prompt": [5] * num_tokens, "max_tokens": max_tokens}
    assert call(APP, "POST", TEXT, json=fitting).status_code == 200
    status, error = refused(TEXT, {"prompt": [5] * (num_tokens + 1), "max_tokens": max_tokens})
    assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_unsupported_fields_that_change_the_answer_are_refused_by_name(field: str) -> None:
    status, error = refused(CHAT, {"messages": [USER], field: {"of": "some kind"}})
    assert (status, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    for harmless in (*UNSUPPORTED[field], None):
        assert chat(APP, **{field: harmless}).status_code == 200


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
    response = call(APP, "POST", TEXT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", "9" * 400 + ".0"])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"])
def test_number_that_no_reply_can_repeat_is_refused_before_it_is_answered(path: str, number: str) -> None:
    service = FakeService(saying("a"))
    content = f'{{"model": "keeper", "tools": [{{"parameters": {{"a": [1, {{"b": {number}}}]}}}}]}}'.encode()
    headers = {"content-type": "application/json"}
    response = call(app_over(service), "POST", path, content=content, headers=headers)
    assert response.status_code == 400
    field = "tools[0].parameters.a[1].b"
    assert response.json()["error"].get("param", field) == field, "errors of Anthropic's API have no param"
    assert f"{field} holds NaN or a number beyond 1.8e308: send finite" in response.text
    assert service.requests == []


def test_body_is_json_by_its_type() -> None:
    response = call(APP, "POST", TEXT, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
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
    body = written.encode(errors="surrogatepass")
    response = call(APP, "POST", path, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param or 'the body'} holds half of a surrogate pair: send valid Unicode"


def test_pairs_and_escaped_backslashes_are_no_half_pairs() -> None:
    body = rb'{"prompt": "\ud83d\ude00 \\ud800"}'
    assert (
        call(APP, "POST", TEXT, content=body, headers={"content-type": "application/json"}).status_code == 200
    )


def test_reply_can_be_sent_whatever_it_repeats() -> None:
    broken = app_over(FakeService(saying("a"), fail_at=0, failure=RequestError("no \ud800", param="\udc00")))
    error = chat(broken).json()["error"]
    assert (error["message"], error["param"]) == ("no \ud800", "\udc00")


@pytest.mark.parametrize("include", [True, 7, "message.output_text.logprobs", {"a": 1}, [1], [[]]])
def test_include_is_a_list_of_texts(include: object) -> None:
    status, error = refused("/v1/responses", {"input": "a", "include": include})
    assert status == 400
    assert str(error["param"]).startswith("include")


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


FAILURES: list[tuple[TidemillError, int, str | None, dict[str, str | None]]] = [
    (
        Unserved("no worker is left"),
        503,
        "1",
        {
            "message": "the request could not be served now, try again: no worker is left",
            "type": "server_error",
            "param": None,
            "code": "unserved",
        },
    ),
    (
        RequestError("schema: x is not supported", param="response_format", code="unfit"),
        400,
        None,
        {
            "message": "schema: x is not supported",
            "type": "invalid_request_error",
            "param": "response_format",
            "code": "unfit",
        },
    ),
    (
        Overloaded("it would take 70 s", predicted_s=70.0, retry_after_s=10.2),
        429,
        "11",  # whole seconds, and not too early
        {"message": "it would take 70 s", "type": "rate_limit_error", "param": None, "code": "overloaded"},
    ),
    (
        Poisonous("it ended two workers"),
        500,
        None,
        {"message": "it ended two workers", "type": "server_error", "param": None, "code": "poisonous"},
    ),
]


@pytest.mark.parametrize(("failure", "status", "retry_after", "error"), FAILURES)
@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("choices", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_failure_is_a_status_before_the_first_message_and_an_event_after_it(
    failure: TidemillError,
    status: int,
    retry_after: str | None,
    error: dict[str, str | None],
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
    assert last["error"] == error
    assert service.open_streams == 0


def test_answer_that_just_ends_is_a_failure() -> None:
    class Short(FakeService):
        async def stream(self, request: Request, emit: Emit[StreamPiece]) -> None:
            with suppress(Enough):
                await super().stream(request, partial(self._first, emit))

        def _first(self, emit: Emit[StreamPiece], piece: StreamPiece) -> None:
            emit(piece)
            raise Enough

    app = app_over(Short(saying(" Emma is here")))
    assert chat(app).status_code == 503
    assert events_of(chat(app, stream=True))[-1]["error"]["code"] == "unserved"
