"""Answers to clients: streamed and whole, stop strings, seeds, usage, the small endpoints."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    EOS,
    TRACE,
    FakeService,
    app_over,
    call,
    chat,
    complete,
    events_of,
    saying,
    tokenizer,
)
from tidemill.cluster.edge.chat.request.request_builder import choice_seed

WORDS = " Emma is in the tower. naïve 日本"


def joined(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_whole_chat_answer() -> None:
    service = FakeService(saying(" Hi."))
    body = chat(app_over(service), model="keeper", temperature=0, max_tokens=20).json()
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_123, "keeper")
    message = {"role": "assistant", "content": " Hi.", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    (request,) = service.requests
    assert (request.max_new_tokens, request.sampling.temperature) == (20, 0)
    assert request.stop_token_ids == (EOS,)
    assert body["usage"]["prompt_tokens"] == len(request.tokens)
    assert body["usage"]["completion_tokens"] == len(tokenizer().encode(" Hi.")) + 1


def test_streamed_chat_answer() -> None:
    chunks = events_of(
        chat(app_over(FakeService(saying(" Hi."))), stream=True, stream_options={"include_usage": True})
    )
    *parts, usage, done = chunks
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tokenizer().encode(" Hi.")) + 1
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in chunks[:-1]}) == 1
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in part["choices"][0]["delta"] for part in parts[1:])
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == " Hi."
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]


def gathered(chunks: list[Any]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for chunk in chunks:
        logprobs: dict[str, list[Any]] = chunk["choices"][0]["logprobs"] or {}
        for name, values in logprobs.items():
            columns.setdefault(name, []).extend(values)
    return columns


@settings(max_examples=60, deadline=None)
@given(
    stop=st.lists(
        st.sampled_from(["tower", " in the", "Emma is", "Emma", ".", "日", "本", "nowhere"]),
        max_size=4,
        unique=True,
    ),
    per_piece=st.integers(1, 5),
    max_tokens=st.integers(1, 30),
    logprobs=st.sampled_from([None, 1]),
    include=st.booleans(),
)
def test_streamed_and_whole_answers_agree(
    stop: list[str], per_piece: int, max_tokens: int, logprobs: int | None, *, include: bool
) -> None:
    app = app_over(FakeService(saying(WORDS), per_piece=per_piece))
    ask = {
        "stop": stop,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "include_stop_str_in_output": include,
    }
    whole = complete(app, **ask)
    (choice,) = whole["choices"]
    body = {"prompt": "Hello", "stream": True, "stream_options": {"include_usage": True}, **ask}
    *chunks, usage, _ = events_of(call(app, "POST", "/v1/completions", json=body))
    assert joined(chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"] == whole["usage"]
    assert include or not any(text in choice["text"] for text in stop)
    columns: dict[str, list[Any]] = choice["logprobs"] or {}
    assert (choice["logprobs"] is None) is (logprobs is None)
    assert gathered(chunks) == {name: column for name, column in columns.items() if column}
    assert all(offset <= len(choice["text"]) for offset in columns.get("text_offset", ()))


@pytest.mark.parametrize("per_piece", [1, 4, 99])
def test_stop_string_ends_the_answer_and_the_work(per_piece: int) -> None:
    service = FakeService(saying(WORDS), per_piece=per_piece)
    body = complete(app_over(service), stop="the tow")
    assert body["choices"][0]["text"] == " Emma is in "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert service.open_streams == 0
    decoder = tokenizer().decoder()
    texts = [decoder.push(token) for token in tokenizer().encode(WORDS)]
    num_tokens = body["usage"]["completion_tokens"]
    assert "the tow" not in "".join(texts[: num_tokens - 1])
    assert "the tow" in "".join(texts[:num_tokens])


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("a b", 1), (["a", "b c"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["a", [7]], 2)],
)
def test_prompts_come_as_texts_or_token_ids(prompt: object, num_prompts: int) -> None:
    service = FakeService(saying(" ok"))
    body = complete(app_over(service), prompt=prompt, n=2)
    choices = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert choices == [(index, " ok") for index in range(2 * num_prompts)]
    sent = [request.tokens for request in service.requests]
    assert sent[::2] == sent[1::2]
    usage = body["usage"]
    assert usage["prompt_tokens"] == sum(len(tokens) for tokens in sent[::2])
    assert usage["prompt_tokens_details"]["fetched_tokens"] == num_prompts * TRACE.provenance.fetched_tokens


def test_streamed_answers_of_one_request_have_an_index() -> None:
    service = FakeService(lambda request: tokenizer().encode(f" {request.sampling.seed}"))
    response = call(
        app_over(service), "POST", "/v1/completions", json={"prompt": "a", "n": 3, "stream": True, "seed": 4}
    )
    texts = {0: "", 1: "", 2: ""}
    for chunk in events_of(response)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {index: f" {choice_seed(4, index)}" for index in range(3)}


def test_chat_opens_all_its_choices_in_order_before_any_text() -> None:
    chunks = events_of(chat(app_over(FakeService(saying(" Hi."))), stream=True, n=3))[:-1]
    opening = [chunk["choices"][0] for chunk in chunks[:3]]
    assert [choice["index"] for choice in opening] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in opening)
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in chunks[3:])


def test_seeds_repeat_when_given_and_differ_when_not() -> None:
    service = FakeService(saying(" a"))
    app = app_over(service)
    for _ in range(2):
        complete(app, n=2, seed=-5)
    for _ in range(2):
        complete(app, n=2)
    seeds = [request.sampling.seed for request in service.requests]
    assert seeds[0:2] == seeds[2:4]
    assert len(set(seeds[2:])) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(9, 9 - 4 - 1), (3, 0)])
def test_usage_has_the_sources_of_the_prompt(num_tokens: int, cached_tokens: int) -> None:
    usage = complete(app_over(FakeService(saying(" a"))), prompt=[5] * num_tokens)["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": cached_tokens,
        "prefilled_tokens": 4,
        "fetched_tokens": 3,
        "replayed_tokens": 1,
        "reused_tokens": 2,
    }


def test_usage_on_every_chunk_when_asked() -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    reply = call(app_over(FakeService(saying(" Emma is"))), "POST", "/v1/completions", json=body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events_of(reply)[:-1]]
    assert counts == list(range(1, len(counts) + 1))


def test_messages_may_hold_text_parts_nulls_and_a_developer() -> None:
    service = FakeService(saying(" a"))
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    for role, content, more in (("developer", parts, {"stop": None}), ("system", "Hello!", {"n": None})):
        messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": content}]
        chat(app_over(service), messages=messages, **more)
    assert service.requests[0].tokens == service.requests[1].tokens


def test_request_id_is_echoed_or_made() -> None:
    app = app_over(FakeService(saying(" a")))

    def echoed(path: str, given: bytes) -> str:
        return call(app, "GET", path, headers={b"x-request-id": given}).headers["x-request-id"]

    assert (echoed("/version", b"mine-7"), echoed("/nowhere", b"e")) == ("mine-7", "e")
    for odd in (b"", b"x" * 129, b"\xc3\xa9"):
        assert echoed("/version", odd).startswith("id")


def test_small_endpoints() -> None:
    app = app_over(FakeService(saying(" a")))
    models = call(app, "GET", "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["keeper"]
    assert call(app, "GET", "/v1/models/keeper").json() == models["data"][0]
    assert call(app, "GET", "/v1/models/a/b").status_code == 404
    assert call(app, "GET", "/health").json() == {"status": "ok"}
    assert call(app, "GET", "/version").json().keys() == {"version"}
    assert "page/docs.js" in call(app, "GET", "/docs").text
    assert "/v1/chat/completions" in call(app, "GET", "/openapi.json").json()["paths"]
    cluster = call(app, "GET", "/cluster").json()
    assert [worker["info"]["name"] for worker in cluster["workers"]] == ["prefill-0", "decode-0"]
    assert cluster["workers"][0]["load"]["memory"]["free"] == 3 << 20
    assert cluster["frontend"]["pid"] > 0
