"""The token ids of replies with `return_token_ids`, in the places where vLLM has them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    EOS,
    FakeService,
    app_over,
    call,
    chat,
    complete,
    events_of,
    saying,
    tokenizer,
)

WORDS = " Emma is in the tower"
TOKENS = [*tokenizer().encode(WORDS), EOS]
PROMPTS = ["Hello", "Bob is here."]


def test_completions_have_them_in_each_choice() -> None:
    reply = complete(app_over(FakeService(saying(WORDS))), prompt=PROMPTS, n=2, return_token_ids=True)
    sent = [tokenizer().encode(prompt) for prompt in PROMPTS]
    assert [choice["token_ids"] for choice in reply["choices"]] == [TOKENS] * 4
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [sent[0], sent[0], sent[1], sent[1]]
    assert "prompt_token_ids" not in reply


def test_chats_have_those_of_the_prompt_beside_the_choices() -> None:
    service = FakeService(saying(WORDS))
    reply = chat(app_over(service), return_token_ids=True, n=2).json()
    assert [choice["token_ids"] for choice in reply["choices"]] == [TOKENS] * 2
    assert reply["prompt_token_ids"] == list(service.requests[0].tokens)
    assert not any("prompt_token_ids" in choice for choice in reply["choices"])


@settings(max_examples=20, deadline=None)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    per_piece=st.integers(1, 5),
    options=st.fixed_dictionaries(
        {},
        optional={
            "n": st.just(2),
            "stop": st.sampled_from(["is", "tower"]),
            "logprobs": st.sampled_from([True]),
            "echo": st.sampled_from([True]),
            "max_tokens": st.integers(1, 4),
        },
    ),
)
def test_streams_add_up_to_whole_replies(path: str, per_piece: int, options: dict[str, Any]) -> None:
    is_chat = path.endswith("chat/completions")
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hello!"}]} if is_chat else {"prompt": "Hello!"}
    )
    body |= {name: value for name, value in options.items() if not (is_chat and name == "echo")}
    if not is_chat and "logprobs" in body:
        body["logprobs"] = 1
    body["return_token_ids"] = True
    app = app_over(FakeService(saying(WORDS), per_piece=per_piece))
    whole = call(app, "POST", path, json=body).json()
    *chunks, _ = events_of(call(app, "POST", path, json={**body, "stream": True}))
    grown: dict[int, list[int]] = {}
    prompts: list[list[int]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            grown.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
            for place in (chunk, choice):
                prompts += [place["prompt_token_ids"]] if "prompt_token_ids" in place else []
    assert grown == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    expected = whole["prompt_token_ids"] if is_chat else whole["choices"][0]["prompt_token_ids"]
    assert prompts == [expected] * options.get("n", 1), "each choice has the prompt once"


def test_echo_alone_has_no_tokens_of_an_answer() -> None:
    reply = complete(
        app_over(FakeService(saying(WORDS))), prompt="Hello", echo=True, max_tokens=0, return_token_ids=True
    )
    assert reply["choices"][0]["token_ids"] == []


def test_best_answer_keeps_its_own_tokens() -> None:
    """The fake finds low ids likelier: the second answer is returned first."""
    service = FakeService(lambda _: [9 if len(service.requests) == 2 else 90])
    reply = complete(app_over(service), n=1, best_of=2, max_tokens=1, return_token_ids=True)
    assert [choice["token_ids"] for choice in reply["choices"]] == [[9]]


@pytest.mark.parametrize("asked", [False, None])
def test_others_have_none(*, asked: bool | None) -> None:
    app = app_over(FakeService(saying(WORDS)))
    for reply in (complete(app, return_token_ids=asked), chat(app, return_token_ids=asked).json()):
        assert "token_ids" not in str(reply)
