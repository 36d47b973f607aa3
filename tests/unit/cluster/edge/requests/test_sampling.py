"""The fields by which clients control an answer, and its logprobs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    call,
    chat,
    complete,
    events_of,
    saying,
    scored,
    tokenizer,
)
from tidemill.cluster.edge.chat.output.detokenizer import Scored
from tidemill.cluster.edge.requests.logprobs import (
    LOGPROB_MIN,
    chat_logprobs,
    completion_logprobs,
    token_text,
)
from tidemill.workers.messages import Grammar, Sampling, TokenLogprob

WORDS = " Emma is in the tower. naïve 日本"
TOKENS = tokenizer().encode(WORDS)


def sampling_of(**body: object) -> Sampling:
    service = FakeService(saying(" a"))
    complete(app_over(service), **body)
    return service.requests[0].sampling


def test_fields_reach_the_workers() -> None:
    sampling = sampling_of(
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": -100, "5": 2.5},
        min_tokens=1,
        logprobs=3,
        structured_outputs={"choice": ["a", "b"]},
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.5,
        -1,
        1.2,
    )
    assert sampling.logit_bias == ((5, 2.5), (7, -100.0))
    assert sampling.min_tokens == 1
    assert sampling.logprobs == 3
    assert sampling.grammar == Grammar(kind="choice", text='["a", "b"]')


def test_missing_fields_change_nothing() -> None:
    plain = Sampling()
    for body in ({}, {"logit_bias": {}, "logprobs": False, "response_format": {"type": "text"}}):
        sampling = sampling_of(seed=1, **body)
        assert sampling == Sampling(seed=sampling.seed)
        assert sampling.logprobs == plain.logprobs


def test_priority_reaches_the_workers() -> None:
    service = FakeService(saying(" a"))
    complete(app_over(service), priority=-7)
    assert service.requests[0].priority == -7


@pytest.mark.parametrize(
    ("asked", "count"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)]
)
def test_chat_asks_for_logprobs_and_alternatives(asked: dict[str, object], count: int | None) -> None:
    service = FakeService(saying(" a"))
    chat(app_over(service), **asked)
    assert service.requests[0].sampling.logprobs == count


def test_logprobs_of_a_whole_chat() -> None:
    body = chat(app_over(FakeService(saying(" 日"))), logprobs=True, top_logprobs=1).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == " 日".encode()
    assert [entry["logprob"] for entry in content] == [
        scored(token, 1).logprob for token in tokenizer().encode(" 日")
    ]
    assert all(entry["token"].startswith("bytes:\\x") for entry in content[-3:])
    piece = tokenizer().piece(10)
    top = {"token": token_text(piece), "logprob": 0.0, "bytes": list(piece)}
    assert all(entry["top_logprobs"] == [top] for entry in content)
    assert chat(app_over(FakeService(saying(" 日")))).json()["choices"][0]["logprobs"] is None


def test_logprobs_of_a_whole_completion() -> None:
    choice = complete(app_over(FakeService(saying(WORDS))), logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [scored(token, 2).logprob for token in TOKENS]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2 + (token not in (10, 11)) for token in TOKENS]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


def gathered(chunks: list[Any]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for chunk in chunks:
        logprobs: dict[str, list[Any]] = chunk["choices"][0]["logprobs"] or {}
        for name, values in logprobs.items():
            columns.setdefault(name, []).extend(values)
    return columns


@settings(max_examples=30, deadline=None)
@given(
    stop=st.lists(st.sampled_from(["tower", " in the", "Emma", ".", "日", "本"]), max_size=2, unique=True),
    per_piece=st.integers(1, 5),
    max_tokens=st.integers(1, 30),
    include=st.booleans(),
)
def test_logprobs_of_streams_and_of_whole_answers_agree(
    stop: list[str], per_piece: int, max_tokens: int, *, include: bool
) -> None:
    app = app_over(FakeService(saying(WORDS), per_piece=per_piece))
    ask = {"stop": stop, "max_tokens": max_tokens, "logprobs": 1, "include_stop_str_in_output": include}
    whole = complete(app, **ask)["choices"][0]
    response = call(app, "POST", "/v1/completions", json={"prompt": "Hello", "stream": True, **ask})
    chunks = events_of(response)[:-1]
    assert gathered(chunks) == {name: column for name, column in whole["logprobs"].items() if column}
    assert all(offset <= len(whole["text"]) for offset in whole["logprobs"]["text_offset"])


@pytest.mark.parametrize(("include", "text"), [(False, " Emma is in "), (True, " Emma is in the tow")])
def test_no_logprobs_behind_a_stop_string(text: str, *, include: bool) -> None:
    app = app_over(FakeService(saying(WORDS), per_piece=4))
    choice = complete(app, stop="the tow", logprobs=0, include_stop_str_in_output=include)["choices"][0]
    assert choice["text"] == text
    assert max(choice["logprobs"]["text_offset"]) < len(text)
    assert "".join(choice["logprobs"]["tokens"]).startswith(text)


def test_stop_string_may_not_end_the_answer_before_min_tokens() -> None:
    app = app_over(FakeService(saying(WORDS)))
    num_tokens = len(tokenizer().encode(" Emma is in"))
    assert complete(app, stop="Emma", min_tokens=num_tokens)["choices"][0]["text"] == WORDS
    assert complete(app, stop="Emma", min_tokens=0)["choices"][0]["text"] == " "


def test_min_tokens_may_be_all_tokens() -> None:
    assert sampling_of(min_tokens=5, max_tokens=5).min_tokens == 5


def test_numbers_that_json_has_not() -> None:
    one = Scored(5, 0, TokenLogprob(float("-inf"), ((6, float("-inf")),)))
    chat_form: Any = chat_logprobs([one], tokenizer().piece)
    assert chat_form["content"][0]["top_logprobs"][0]["logprob"] == LOGPROB_MIN
    completion_form: Any = completion_logprobs([one], tokenizer().piece)
    assert completion_form["token_logprobs"] == [LOGPROB_MIN]
