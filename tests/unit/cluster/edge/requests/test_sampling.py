"""The fields by which clients control an answer, and its logprobs."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    chat,
    complete,
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
CHOICE = Grammar(kind="choice", text='["a", "b"]')


@pytest.mark.parametrize(
    "body", [{}, {"logit_bias": {}, "logprobs": False, "response_format": {"type": "text"}}]
)
def test_missing_fields_change_nothing(body: dict[str, object]) -> None:
    service = FakeService(saying(" a"))
    complete(app_over(service), seed=1, **body)
    sampling = service.requests[0].sampling
    assert sampling == Sampling(seed=sampling.seed, seeded=True)


@pytest.mark.parametrize(
    ("send", "body", "field", "value"),
    [
        (complete, {"priority": -7}, "priority", -7),
        (complete, {"cache_salt": "tenant-1"}, "salt", "tenant-1"),
        (complete, {"prompt": [5] * 100}, "max_new_tokens", MODEL.max_model_len - 100),
        (complete, {"min_tokens": 5, "max_tokens": 5}, "sampling.min_tokens", 5),
        (complete, {"presence_penalty": 0.5}, "sampling.presence_penalty", 0.5),
        (complete, {"frequency_penalty": -1}, "sampling.frequency_penalty", -1),
        (complete, {"repetition_penalty": 1.2}, "sampling.repetition_penalty", 1.2),
        (complete, {"logit_bias": {"7": -100, "5": 2.5}}, "sampling.logit_bias", ((5, 2.5), (7, -100.0))),
        (complete, {"logprobs": 3}, "sampling.logprobs", 3),
        (complete, {"structured_outputs": {"choice": ["a", "b"]}}, "sampling.grammar", CHOICE),
        (chat, {"max_tokens": 3, "max_completion_tokens": 5}, "max_new_tokens", 5),
        (chat, {}, "sampling.logprobs", None),
        (chat, {"logprobs": True}, "sampling.logprobs", 0),
        (chat, {"logprobs": True, "top_logprobs": 20}, "sampling.logprobs", 20),
    ],
)
def test_field_reaches_the_workers(
    send: Callable[..., object], body: dict[str, object], field: str, value: object
) -> None:
    service = FakeService(saying(" a"))
    send(app_over(service), **body)
    assert attrgetter(field)(service.requests[0]) == value


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


def test_numbers_that_json_has_not() -> None:
    one = Scored(5, 0, TokenLogprob(float("-inf"), ((6, float("-inf")),)))
    chat_form: Any = chat_logprobs([one], tokenizer().piece)
    assert chat_form["content"][0]["top_logprobs"][0]["logprob"] == LOGPROB_MIN
    completion_form: Any = completion_logprobs([one], tokenizer().piece)
    assert completion_form["token_logprobs"] == [LOGPROB_MIN]
