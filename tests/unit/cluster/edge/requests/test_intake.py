"""The fields by which clients control a prompt, its answer and their logprobs, as in vLLM."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    call,
    chat,
    complete,
    saying,
    scored,
    tokenizer,
)
from tidemill.cluster.edge.chat.output.detokenizer import Scored
from tidemill.cluster.edge.chat.request.request_builder import bad_words_of
from tidemill.cluster.edge.chat.text import MarkedPrompt
from tidemill.cluster.edge.requests.logprobs import (
    LOGPROB_MIN,
    chat_logprobs,
    completion_logprobs,
    token_text,
)
from tidemill.workers.messages import Grammar, RequestError, Sampling, TokenLogprob

IDS = list(range(20, 60))


def sent(**body: object) -> Any:  # noqa: ANN401  a request
    service = FakeService(saying(" ok"))
    complete(app_over(service), **body)
    return service.requests[-1]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 7}, IDS[-7:]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, IDS[-7:]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, IDS[:7]),
        ({"truncate_prompt_tokens": 40}, IDS),
        ({"truncate_prompt_tokens": 400}, IDS),
        ({"truncate_prompt_tokens": -1}, IDS),
        ({"truncate_prompt_tokens": -1, "max_tokens": 500}, IDS[-12:]),
        ({"truncation_side": "right"}, IDS),
    ],
)
def test_prompt_is_cut(fields: dict[str, object], kept: list[int]) -> None:
    assert list(sent(prompt=IDS, **fields).tokens) == kept


def test_chat_and_text_are_cut_after_they_are_tokenized() -> None:
    service = FakeService(saying(" ok"))
    app = app_over(service)
    chat(app)
    chat(app, truncate_prompt_tokens=5)
    whole, cut = (request.tokens for request in service.requests)
    assert cut == whole[-5:]
    text = "Alice keeps the key in the harbor."
    tokens = tuple(tokenizer().encode(text))
    assert sent(prompt=text, truncate_prompt_tokens=3).tokens == tokens[-3:]
    shown = complete(
        app, prompt=text, truncate_prompt_tokens=3, truncation_side="right", echo=True, max_tokens=0
    )
    assert shown["choices"][0]["text"] == "".join(tokenizer().piece(token).decode() for token in tokens[:3])
    assert shown["usage"]["prompt_tokens"] == 3


def test_breakpoints_move_with_the_cut() -> None:
    prompt = MarkedPrompt(IDS, (5, 30, 40))
    assert prompt.cut(20, at_start=True) == MarkedPrompt(IDS[20:], (10, 20))
    assert prompt.cut(30, at_start=False) == MarkedPrompt(IDS[:30], (5, 30))
    assert prompt.cut(0, at_start=True) == MarkedPrompt([], ())


SPELLED = {"a": [1], " a": [2], "ab": [1, 3], " ab": [2, 4], "c": [5], " c": [5, 6], "d": [7], " d": [7]}


def test_bad_words_have_the_tokens_that_vllm_gives_them() -> None:
    """A word behind a space counts if it has as many tokens and another first one."""
    assert bad_words_of(["a", "ab", " a", "c", "d", "a"], SPELLED.__getitem__) == (
        *((1,), (2,), (1, 3), (2, 4)),
        *((1,), (2,)),  # " a" is "a"
        *((5,), (7,)),
    )
    with pytest.raises(RequestError, match="has no tokens"):
        bad_words_of([" "], lambda _: [])
    with pytest.raises(RequestError, match="send fewer than 64 words"):
        bad_words_of([str(number) for number in range(65)], lambda text: [ord(text[0]), len(text)])


def test_bad_words_reach_the_draws() -> None:
    found = sent(prompt="a", bad_words=["harbor"]).sampling.bad_words
    assert tuple(tokenizer().encode_inside("harbor")) in found
    words = {"".join(tokenizer().piece(token).decode() for token in word).strip() for word in found}
    assert words == {"harbor"}


@pytest.mark.parametrize("shares", [False, True])
def test_requests_of_a_model_without_prefix_caching_share_no_keys(*, shares: bool) -> None:
    service = FakeService(saying(" ok"), model=replace(MODEL, prefix_caching=shares))
    app = app_over(service)
    for _ in range(2):
        complete(app, prompt=["Hello", "Hello"], n=2, cache_salt="team")
        chat(app)
    assert len(service.requests) == 10
    assert len({request.salt for request in service.requests}) == (2 if shares else 10)
    assert len({request.tenant for request in service.requests}) == 2, "tenants are not split"
    reply = call(app, "POST", "/v1/prefixes", json={"prompt": "Hello"})
    assert reply.status_code == (200 if shares else 400)
    assert shares or "--no-enable-prefix-caching" in reply.json()["error"]["message"]


WORDS = " Emma is in the tower. naïve 日本"
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
