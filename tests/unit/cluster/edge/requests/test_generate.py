"""Tokens in, tokens out: vLLM's fields, over the checks of completions."""

from dataclasses import replace
from typing import Any

import pytest
from httpx import Response

from tests.support.cluster.fake_service import EOS, FakeService, app_over, call, saying, tokenizer

PATH = "/inference/v1/generate"
WORDS = " Emma is in the tower"
PROMPT = tokenizer().encode("Where is Emma?")
TOKENS = [*tokenizer().encode(WORDS), EOS]


def sent(service: FakeService, sampling_params: dict[str, Any] | None = None, **fields: object) -> Response:
    body = {"token_ids": PROMPT, "sampling_params": sampling_params or {}, **fields}
    return call(app_over(service), "POST", PATH, json=body)


def test_answer_is_the_tokens_of_a_completion() -> None:
    service = FakeService(saying(WORDS))
    reply = sent(service, {"n": 2, "seed": 7, "temperature": 0.5}, request_id="r-1").json()
    assert [choice["token_ids"] for choice in reply["choices"]] == [TOKENS] * 2
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    assert {choice["logprobs"] for choice in reply["choices"]} == {None}
    assert (reply["request_id"], reply["kv_transfer_params"], reply["prompt_logprobs"]) == ("r-1", None, None)
    assert reply["usage"]["completion_tokens"] == 2 * len(TOKENS)
    [first, _] = service.requests
    assert first.tokens == tuple(PROMPT)
    assert first.sampling.temperature == 0.5
    assert first.max_new_tokens > 100, "as many as fit"


def test_parameters_and_hints_are_those_of_a_completion() -> None:
    """Each request is the one that /v1/completions makes of the same fields."""
    hints: dict[str, Any] = {"priority": -3, "cache_salt": "team-a", "session_id": "s", "retain": 60}
    sampling: dict[str, Any] = {
        "max_tokens": 5,
        "min_tokens": 1,
        "top_p": 0.5,
        "top_k": 4,
        "seed": 3,
        "stop": ["is"],
        "stop_token_ids": [9],
        "logit_bias": {"4": 2.0},
        "bad_words": ["Tom"],
        "repetition_penalty": 1.1,
        "structured_outputs": {"choice": ["a", "b"]},
    }
    ours, theirs = FakeService(saying(WORDS)), FakeService(saying(WORDS))
    reply = sent(ours, {**sampling, "detokenize": False, "output_kind": 2}, **hints)
    assert reply.headers.get("x-tidemill-ignored") is None
    call(app_over(theirs), "POST", "/v1/completions", json={"prompt": PROMPT, **sampling, **hints})
    [request], [completion] = ours.requests, theirs.requests
    assert request == replace(completion, request_id=request.request_id)


def test_logprobs_name_tokens() -> None:
    reply = sent(FakeService(saying(WORDS)), {"logprobs": 1, "prompt_logprobs": 0}).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in TOKENS]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)
    assert len(reply["prompt_logprobs"]) == len(PROMPT)
    assert reply["prompt_logprobs"][0] is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": ["a"]}, "token_ids[0]"),
    ({"token_ids": [1 << 20]}, "token_ids"),
    ({"token_ids": [-1]}, "token_ids"),
    ({"sampling_params": None}, "sampling_params"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"stop": [1]}}, "sampling_params.stop[0]"),
    ({"sampling_params": {"allowed_token_ids": [1]}}, "sampling_params.allowed_token_ids"),
    ({"sampling_params": {"prompt": "a"}}, "sampling_params.prompt"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": "a" * 129}, "request_id"),
    ({"cache_salt": "a b"}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    service = FakeService(saying(WORDS))
    reply = call(app_over(service), "POST", PATH, json={"token_ids": PROMPT, "sampling_params": {}, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not service.requests


def test_fields_of_completions_without_an_effect_are_named() -> None:
    reply = sent(FakeService(saying(WORDS)), {"allowed_token_ids": None}, temperature=0.5, echo=True, oh=1)
    assert reply.status_code == 200
    assert set(reply.headers["x-tidemill-ignored"].split(", ")) == {"temperature", "echo", "oh"}
