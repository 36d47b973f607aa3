"""Embeddings, rerank and score: prompts, numbers and refusals, over a service that pools."""

import base64
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.cluster.fake_service import (
    KEEPER,
    MODEL,
    FakeService,
    app_over,
    call,
    tokenizer,
)
from tests.support.cluster.openai_talk import conversing
from tidemill.cluster.edge.apis import pooling_body
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer, text_of
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.settings import ChatSettings
from tidemill.workers.messages import Pooling, Request, Unserved

EMBED = Pooling(kind="embed", size=4)
RANK = Pooling(kind="classify", size=2)
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
END = 5


def pooled(request: Request) -> list[float]:
    """Numbers that follow from the prompt."""
    return [float(1 + sum(request.tokens[index::4])) for index in range(4)]


def served(pooling: Pooling | None = EMBED, **changes: Any) -> FakeService:  # noqa: ANN401 - by name
    return FakeService(lambda _: [], pooled=pooled, model=replace(MODEL, pooling=pooling), **changes)


def app_of(service: FakeService, tokens: FolderTokenizer | None = None) -> FastAPI:
    return app_over(service, tokens=tokens)


def post(path: str, service: FakeService | None = None, /, **body: Any) -> httpx.Response:  # noqa: ANN401 - JSON
    return call(app_of(service or served()), "POST", path, json=body)


def refused(reply: httpx.Response, param: str | None, *words: str, status: int = 400) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert all(word in error["message"] for word in words), error["message"]


def ends_texts() -> FolderTokenizer:
    """A tokenizer that puts a token at the end of every text, as that of Qwen3-Embedding does."""
    raw = RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))
    end = raw.id_to_token(END)
    raw.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    return FolderTokenizer(raw, None)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a b", [[69, 309]]),
        (["a b", "b"], [[69, 309], [70]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
def test_embeddings_of_texts_and_tokens(given: object, prompts: list[list[int]]) -> None:
    service = served()
    reply = post(EMBEDDINGS, service, input=given, model="keeper").json()
    assert [list(request.tokens) for request in service.requests] == prompts
    assert all(request.pools and request.max_new_tokens == 0 for request in service.requests)
    for request, row in zip(service.requests, reply["data"], strict=True):
        exact = np.array(pooled(request))
        np.testing.assert_array_equal(row["embedding"], (exact / np.linalg.norm(exact)).astype(np.float32))
    assert [(row["object"], row["index"]) for row in reply["data"]] == [
        ("embedding", index) for index in range(len(prompts))
    ]
    count = sum(map(len, prompts))
    assert (reply["object"], reply["model"]) == ("list", "keeper")
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (count, count)


def test_base64_has_the_same_bits() -> None:
    plain, packed = (
        post(EMBEDDINGS, input="a b", encoding_format=form).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert list(struct.unpack("<4f", base64.b64decode(packed))) == plain


def test_numbers_as_they_come_if_the_model_or_the_client_wants_it() -> None:
    whole = pooled(Request(request_id="", tokens=(69, 309), max_new_tokens=0))
    unnormalised = served(replace(EMBED, normalize=False))
    for reply in (
        post(EMBEDDINGS, input="a b", use_activation=False),
        post(EMBEDDINGS, unnormalised, input="a b"),
    ):
        assert reply.json()["data"][0]["embedding"] == whole
    again = post(EMBEDDINGS, unnormalised, input="a b", use_activation=True).json()["data"][0]["embedding"]
    assert math.hypot(*again) == pytest.approx(1)


def test_dimensions_where_the_model_allows_them() -> None:
    service = served(replace(EMBED, dimensions=()))
    row = post(EMBEDDINGS, service, input="a b", dimensions=2).json()["data"][0]["embedding"]
    first = np.array(pooled(service.requests[0])[:2])
    np.testing.assert_allclose(row, first / np.linalg.norm(first), rtol=1e-6)
    assert post(EMBEDDINGS, input="a", dimensions=4).status_code == 200
    refused(post(EMBEDDINGS, input="a", dimensions=2), "dimensions", "4 dimensions", '"is_matryoshka"')
    refused(post(EMBEDDINGS, service, input="a", dimensions=5), "dimensions", "1 to 4")
    some = served(replace(EMBED, dimensions=(2, 3)))
    refused(post(EMBEDDINGS, some, input="a", dimensions=1), "dimensions", "2, 3")
    assert len(post(EMBEDDINGS, some, input="a", dimensions=3).json()["data"][0]["embedding"]) == 3


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({"truncate_prompt_tokens": 3}, slice(2)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-2, None)),
    ],
)
def test_the_end_of_a_text_survives_its_truncation(cut: dict[str, object], kept: slice) -> None:
    service, words = served(), tokenizer().encode("a b c")
    reply = call(app_of(service, ends_texts()), "POST", EMBEDDINGS, json={"input": "a b c", **cut})
    assert reply.status_code == 200, reply.text
    assert list(service.requests[0].tokens) == [*words[kept], END]


def test_token_ids_are_as_they_are() -> None:
    service = served()
    app = app_of(service, ends_texts())
    call(app, "POST", EMBEDDINGS, json={"input": [7, 8, 9], "truncate_prompt_tokens": 2})
    assert service.requests[0].tokens == (7, 8)


def test_rerank_with_the_words_of_the_model() -> None:
    service = served(RANK)
    service.pooled = lambda request: [0.0, -float(len(request.tokens))]
    documents = ["a far longer text", "short", {"text": "longer text"}]
    reply = post(RERANK, service, query="q", documents=documents, top_n=2, instruction="Find it")
    found = reply.json()
    assert [row["index"] for row in found["results"]] == [1, 2]
    assert [row["document"] for row in found["results"]] == [{"text": "short"}, {"text": "longer text"}]
    for row in found["results"]:
        logit = len(service.requests[row["index"]].tokens)
        assert row["relevance_score"] == pytest.approx(1 / (1 + math.exp(logit)))
    assert {"id", "model", "usage"} <= found.keys()
    tokens = service.requests[1].tokens
    assert "<Instruct>: Find it\n<Query>: q\n<Document>: short" in text_of(tokenizer(), tokens)
    depth = max(set.intersection(*(set(request.breakpoints) for request in service.requests)))
    assert len({request.tokens[:depth] for request in service.requests}) == 1
    assert text_of(tokenizer(), tokens[:depth]).endswith("<Query>: q\n<Document>:")


def test_rerank_shows_documents_unless_it_should_not() -> None:
    reply = post(RERANK, served(RANK), query="q", documents=["a"], return_documents=False)
    assert reply.json()["results"] == [
        {"index": 0, "relevance_score": reply.json()["results"][0]["relevance_score"]}
    ]


def test_a_long_document_is_cut_and_the_chat_around_it_is_not() -> None:
    service = served(RANK)
    for document in ("", "word " * 300):
        reply = post(RERANK, service, query="q", documents=[document], truncate_prompt_tokens=200)
        assert reply.status_code == 200, reply.text
    empty, cut = (list(request.tokens) for request in service.requests)
    assert len(cut) == 200
    assert cut[-3:] == empty[-3:]  # this template removes the blank before an empty document
    reply = post(RERANK, service, query="q", documents=["word " * 300])
    refused(reply, "input", "maximum context length", "truncate_prompt_tokens")
    refused(
        post(RERANK, service, query="q", documents=["a b c"], truncate_prompt_tokens=3),
        "truncate_prompt_tokens",
    )


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_score_of_one_text_and_others_or_of_pairs(names: tuple[str, str]) -> None:
    service = served(replace(RANK, size=1))
    service.pooled = lambda request: [len(request.tokens) / 100]
    one = post(SCORE, service, **{names[0]: "q", names[1]: ["a", "b c d"]}).json()
    pairs = post(SCORE, service, **{names[0]: ["q", "q q"], names[1]: ["a", "b"]}).json()
    for reply, requests in ((one, service.requests[:2]), (pairs, service.requests[2:])):
        wanted = [1 / (1 + math.exp(-len(request.tokens) / 100)) for request in requests]
        assert [row["score"] for row in reply["data"]] == pytest.approx(wanted)
    refused(post(SCORE, service, text_1=["a", "b"], text_2=["a"]), "text_1", "2 texts", "1")
    raw = post(SCORE, service, text_1="q", text_2="a", use_activation=False).json()["data"][0]["score"]
    assert raw == pytest.approx(len(service.requests[-1].tokens) / 100)


def test_an_embedder_scores_by_the_cosine() -> None:
    service = served()
    rows = post(SCORE, service, text_1="a b", text_2=["a b", "b"]).json()["data"]
    first, second = (np.array(pooled(request)) for request in service.requests[1:])
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert [row["score"] for row in rows] == pytest.approx([1.0, cosine])
    assert len(post(RERANK, query="a", documents=["b", "c"]).json()["results"]) == 2


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/score"])
def test_the_other_paths_of_vllm(path: str) -> None:
    body = {"query": "q", "documents": ["a"]} if "rerank" in path else {"text_1": "q", "text_2": "a"}
    reply = post(path, served(RANK), **body)
    assert reply.json().keys() >= {"results" if "rerank" in path else "data"}


def test_models_for_one_kind_of_work_refuse_the_other() -> None:
    generates = served(None)
    for path, body in (
        (EMBEDDINGS, {"input": "a"}),
        (RERANK, {"query": "q", "documents": ["a"]}),
        (SCORE, {"text_1": "q", "text_2": "a"}),
    ):
        refused(post(path, generates, **body), "model", "--convert embed", "--convert classify")
    refused(post(EMBEDDINGS, served(RANK), input="a"), "model", "/v1/rerank", "--convert embed")
    refused(post("/v1/completions", served(), prompt="a"), "model", "/v1/embeddings")
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        body = {**chat, "input": "a", "max_tokens": 3}
        assert "/v1/embeddings" in post(path, served(), **body).text


def test_query_that_many_documents_repeat_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooling_body, "PAIRS_CHARS_MAX", 50)
    service = served(RANK)
    assert post("/v1/rerank", service, query="a" * 9, documents=["b"] * 5).status_code == 200
    reply = post("/v1/rerank", service, query="a" * 9, documents=["b"] * 6)
    refused(reply, "documents", "60 characters", "fewer documents")


def test_too_many_numbers_are_refused_before_they_are_computed() -> None:
    service = served(Pooling(kind="embed", size=1 << 20))
    refused(post(EMBEDDINGS, service, input=["a"] * 5), "input", "at most 4")
    assert not service.requests


def test_numbers_that_are_not_finite_are_an_error() -> None:
    service = served()
    service.pooled = lambda _: [math.nan] * 4
    refused(post(EMBEDDINGS, service, input="a"), None, "not finite", status=500)


def test_a_failure_of_one_input_fails_the_request() -> None:
    service = served(fail_at=3, failure=Unserved("no worker is left"))
    refused(post(EMBEDDINGS, service, input=["a"] * 200), None, "no worker is left", status=503)
    assert service.open_streams == 0


def test_hints_and_ignored_fields() -> None:
    service = served()
    app = app_of(service)
    body = {"input": "a", "priority": -3, "cache_salt": "s1", "user": "u", "temperature": 0.3}
    reply = call(app, "POST", EMBEDDINGS, json=body)
    assert set(reply.headers["x-tidemill-ignored"].split(", ")) == {"user", "temperature"}
    (request,) = service.requests
    assert (request.priority, request.salt) == (-3, "s1")


async def test_the_sdk_reads_what_it_asks_for() -> None:
    """It asks for base64 if its user names no form."""
    async with conversing(served()) as client:
        packed, plain = [
            (await client.embeddings.create(model="keeper", input=["a b", "b"], **form)).data[0].embedding
            for form in ({}, {"encoding_format": "float"})
        ]
    assert struct.pack("<4f", *packed) == struct.pack("<4f", *plain)
    assert math.hypot(*plain) == pytest.approx(1)


def test_the_list_of_requests_has_them() -> None:
    app = app_of(served())
    call(app, "POST", EMBEDDINGS, json={"input": ["a b", "b"]})
    (row,) = call(app, "GET", "/cluster/requests").json()["requests"]
    assert (row["kind"], row["choices"], row["finish"], row["prompt_tokens"]) == ("embeddings", 2, "stop", 3)
    assert json.dumps(row)


QWEN = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""The part of Qwen3's chat template that a chat without tools runs."""


def test_prompt_of_qwen3_reranker_is_the_published_one(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(QWEN)
    tokens = load_tokenizer(KEEPER, ChatSettings(template=str(template)))
    service = served(RANK)
    call(app_of(service, tokens), "POST", RERANK, json={"query": "What is it?", "documents": ["It is it."]})
    assert text_of(tokens, service.requests[0].tokens) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the "
        "query\n"
        "<Query>: What is it?\n<Document>: It is it.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
