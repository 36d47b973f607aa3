"""Completions about their prompt: its text, the logprob of each token, and the best of several answers."""

from typing import Any

import pytest

from tests.support.cluster.fake_service import (
    EOS,
    FakeService,
    app_over,
    call,
    chat,
    complete,
    saying,
    scored,
    tokenizer,
)
from tidemill.cluster.edge.requests.intake import PROMPT_LOGPROBS_MAX
from tidemill.workers.messages import Request

TEXT = "/v1/completions"
PROMPT = "Bob is now at the 日本 mill."
IDS = tokenizer().encode(PROMPT)
WORDS = " Emma is here."


def refused(path: str, **body: object) -> tuple[int, Any]:
    service = FakeService(saying(WORDS))
    response = call(app_over(service), "POST", path, json=body)
    assert not service.requests
    return response.status_code, response.json()["error"]["param"]


@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("per_piece", [1, 7])
def test_echo_with_logprobs(prompt: str | list[int], per_piece: int) -> None:
    app = app_over(FakeService(saying(WORDS), per_piece=per_piece))
    choice = complete(app, prompt=prompt, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == PROMPT + WORDS
    tokens = [*IDS, *tokenizer().encode(WORDS), EOS]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(scored(token, 1).logprob for token in tokens[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [1 + (token != 10) for token in tokens[1:]]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize(("max_tokens", "count"), [(0, 0), (1, 1)])
def test_text_is_scored_as_harnesses_request_it(max_tokens: int, count: int) -> None:
    """The requests are those of evaluation harnesses. The last token is a drawn one, or one of the prompt."""
    service = FakeService(saying(WORDS))
    reply = complete(app_over(service), prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens)
    choice = reply["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(IDS) + count
    assert reply["usage"]["completion_tokens"] == count
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(PROMPT)
    assert (choice["text"] == PROMPT) is (count == 0)
    assert (service.requests[0].max_new_tokens, service.requests[0].sampling.prompt_logprobs) == (1, 1)


def test_stop_token_that_was_drawn_is_one_of_the_echoed_tokens() -> None:
    """Otherwise a client that removes the last one would remove one of the prompt's."""
    app = app_over(FakeService(saying("")))
    (choice,) = complete(app, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert len(choice["logprobs"]["tokens"]) == len(IDS) + 1
    assert complete(app, logprobs=1)["choices"][0]["logprobs"]["tokens"] == []


def test_echo_without_logprobs_scores_nothing() -> None:
    service = FakeService(saying(WORDS))
    choices = complete(app_over(service), prompt=["Hello", "Bob"], n=2, echo=True)["choices"]
    texts = [(choice["text"], choice["logprobs"]) for choice in choices]
    assert texts == [(f"{name}{WORDS}", None) for name in ("Hello", "Hello", "Bob", "Bob")]
    assert {request.sampling.prompt_logprobs for request in service.requests} == {None}


@pytest.mark.parametrize("logprobs", [None, 0, 4])
def test_prompt_logprobs_in_the_form_of_vllm(logprobs: int | None) -> None:
    service = FakeService(saying(WORDS))
    reply = complete(
        app_over(service),
        prompt=[PROMPT, "Bob"],
        prompt_logprobs=2,
        echo=logprobs is not None,
        logprobs=logprobs,
    )
    scores = reply["choices"][0]["prompt_logprobs"]
    assert len(scores) == len(IDS)
    assert scores[0] is None
    for token, entries in zip(IDS[1:], scores[1:], strict=True):
        assert entries[str(token)]["logprob"] == scored(token, 2).logprob or token in (10, 11)
        assert [entries[str(10 + place)]["rank"] for place in range(2)] == [1, 2]
        assert len(entries) == (2 if token in (10, 11) else 3)
    assert len(reply["choices"][1]["prompt_logprobs"]) == len(tokenizer().encode("Bob"))
    assert service.requests[0].sampling.prompt_logprobs == max(2, logprobs or 0)
    if logprobs == 0:
        assert {len(top or "a") for top in reply["choices"][0]["logprobs"]["top_logprobs"]} == {1}


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices() -> None:
    service = FakeService(saying(WORDS))
    reply = chat(app_over(service), prompt_logprobs=0).json()
    (request,) = service.requests
    assert [list(scores or "-") for scores in reply["prompt_logprobs"]] == [
        ["-"],
        *([str(token)] for token in request.tokens[1:]),
    ]
    assert "prompt_logprobs" not in chat(app_over(service)).json()


def best_script(request: Request) -> list[int]:
    """Each answer is one token again and again: the lower its id, the likelier the fake finds it."""
    return [100 - request.sampling.seed % 50] * (1 + request.sampling.seed % 3)


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (1, 6), (3, 6), (4, 4)])
def test_best_answers_come_in_order(n: int, best_of: int) -> None:
    service = FakeService(best_script)
    reply = complete(app_over(service), prompt=["Hello", "Bob"], n=n, best_of=best_of, max_tokens=5)
    wanted: list[str] = []
    for start in (0, best_of):
        answers = [best_script(request) for request in service.requests[start : start + best_of]]
        if n < best_of:
            answers.sort(key=lambda ranked: ranked[0])
        wanted += ["".join(tokenizer().piece(token).decode() for token in answer) for answer in answers[:n]]
    choices = [(choice["index"], choice["text"], choice["logprobs"]) for choice in reply["choices"]]
    assert choices == [(index, text, None) for index, text in enumerate(wanted)]
    drawn = sum(len(best_script(request)) for request in service.requests)
    assert reply["usage"]["completion_tokens"] == drawn, "they were drawn, returned or not"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 64, "best_of": 3}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [[5] * 500] * 40, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[5] * 500] * 40, "echo": True, "logprobs": 20}, "logprobs"),
    ],
)
def test_unsupported_combinations_are_named(body: dict[str, object], param: str) -> None:
    assert refused(TEXT, **{"prompt": "Hello", **body}) == (400, param)
    assert PROMPT_LOGPROBS_MAX < 40 * 500 * 21
