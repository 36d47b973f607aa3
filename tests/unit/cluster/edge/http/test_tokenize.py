"""Tokenizing over HTTP, and the probes."""

from typing import Any

import pytest

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    call,
    saying,
    tokenizer,
    worker_status,
)

APP = app_over(FakeService(saying("a")))


def post(path: str, **body: object) -> tuple[int, dict[str, Any]]:
    reply = call(APP, "POST", path, json=body)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("text", ["Where is Emma?", "", "na\u00efve \u65e5\u672c", "<|user|> a<|end|>"])
def test_text_and_back(text: str) -> None:
    status, found = post("/tokenize", model="keeper", prompt=text, return_token_strs=True)
    assert status == 200
    assert found["tokens"] == tokenizer().encode(text)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == MODEL.max_model_len
    assert post("/detokenize", tokens=found["tokens"]) == (200, {"prompt": text})


def test_chat_as_the_template_writes_it() -> None:
    messages = [{"role": "user", "content": "Where is Emma?"}]
    _, found = post("/tokenize", messages=messages)
    assert found["token_strs"] is None
    _, text = post("/detokenize", tokens=found["tokens"])
    assert text["prompt"] == "<|user|> Where is Emma?<|end|>\n<|assistant|>"
    _, bare = post("/tokenize", messages=messages, add_generation_prompt=False)
    assert found["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < found["count"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [MODEL.vocab_size]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
    ],
)
def test_errors_name_the_field(path: str, body: dict[str, object], status: int) -> None:
    found, error = post(path, **body)
    assert (found, bool(error["error"]["message"])) == (status, True)


def test_probes() -> None:
    bare = app_over(FakeService(saying("a"), workers=(worker_status("prefill-0", "prefill"),)))
    for path, with_workers, without in (
        ("/health", 200, 503),
        ("/health/ready", 200, 503),
        ("/health/live", 200, 200),
        ("/ping", 200, 200),
    ):
        assert call(APP, "GET", path).status_code == with_workers
        assert call(bare, "GET", path).status_code == without
    assert call(APP, "GET", "/load").json() == {"server_load": 0}
