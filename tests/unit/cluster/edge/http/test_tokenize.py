"""Tokenizing over HTTP, and the probes."""

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from tokenizers import Encoding

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    call,
    exchange,
    saying,
    tokenizer,
    worker_status,
)
from tidemill.cluster.edge.apis.json_bytes import SLICE_ITEMS, large_json
from tidemill.cluster.edge.chat.text import MarkedPrompt
from tidemill.cluster.edge.chat.tokenizer import SLICE_TOKENS, FolderTokenizer, text_of
from tidemill.cluster.edge.http import middleware
from tidemill.cluster.edge.http.middleware import PACED_BYTES_MIN
from tidemill.cluster.edge.requests.intake import INLINE_CHARS_MAX

PIECE_BYTES = 1 << 14
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


def test_long_text_of_tokens_is_that_of_its_slices() -> None:
    """A character of several tokens may begin in one slice and end in the next."""
    tokens = tokenizer().encode("na\u00efve \u65e5\u672c")
    many = tokens * (2 * SLICE_TOKENS // len(tokens) + 3)
    assert text_of(tokenizer(), many) == "na\u00efve \u65e5\u672c" * (len(many) // len(tokens))


def test_chat_as_the_template_writes_it() -> None:
    messages = [{"role": "user", "content": "Where is Emma?"}]
    _, found = post("/tokenize", messages=messages)
    assert found["token_strs"] is None
    _, text = post("/detokenize", tokens=found["tokens"])
    assert text["prompt"] == "<|user|> Where is Emma?<|end|>\n<|assistant|>"
    _, bare = post("/tokenize", messages=messages, add_generation_prompt=False)
    assert found["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < found["count"]


def test_probes() -> None:
    bare = app_over(FakeService(saying("a"), workers=(worker_status("prefill-0", "prefill"),)))
    for path, without in (("/health", 503), ("/health/ready", 503), ("/health/live", 200), ("/ping", 200)):
        assert call(APP, "GET", path).status_code == 200
        assert call(bare, "GET", path).status_code == without
    for workers in ((), (worker_status("decode-0", state="silent"),)):
        reply = call(app_over(FakeService(saying("a"), workers=workers)), "GET", "/health")
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
    model = replace(MODEL, cold_start_s_max=300.0)
    idle = app_over(FakeService(saying("a"), workers=(), model=model))
    assert call(idle, "GET", "/health").status_code == 200, "or no request would come and start it"
    assert call(APP, "GET", "/load").json() == {"server_load": 0}


def test_text_beyond_any_tokens_of_the_model_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MODEL.max_model_len * tokenizer().token_chars_max
    status, found = post("/tokenize", prompt="a" * most)
    assert (status, found["count"] > 0) == (200, True)
    original = FolderTokenizer._encoding

    def encoding(tokens: FolderTokenizer, text: str, **options: Any) -> Encoding:  # noqa: ANN401 - its own
        assert text == "a"
        return original(tokens, text, **options)

    monkeypatch.setattr(FolderTokenizer, "_encoding", encoding)
    halves = {"messages": [{"role": "user", "content": "a" * (most // 2 + 1)}] * 2}
    function = {"name": "f", "arguments": json.dumps({"a": "a" * most})}
    calls = {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"function": function}]}]}
    tool = {"type": "function", "function": {"name": "f", "description": "a" * most}}
    tools = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "a" * (most + 1)}),
        ("/v1/completions", {"prompt": ["a", "a" * (most + 1)]}),
        *(("/tokenize", body) for body in (halves, calls, tools)),
        *(("/v1/chat/completions", body) for body in (halves, calls, tools)),
    ]
    for path, body in bodies:
        status, error = post(path, **body)
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("field", ["reasoning_content", "name", "content"])
def test_long_chats_are_rendered_in_a_thread(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever field has the text; the loop goes on meanwhile. Of these threads there are few."""
    seen: list[threading.Thread] = []

    def chat(*_: object) -> MarkedPrompt:
        seen.append(threading.current_thread())
        return MarkedPrompt([5])

    monkeypatch.setattr(FolderTokenizer, "chat", chat)
    monkeypatch.setattr(FolderTokenizer, "token_chars_max", 1 << 20, raising=False)
    message = {"role": "assistant", "content": "", field: "a" * (INLINE_CHARS_MAX + 1)}
    context_model = replace(MODEL, max_model_len=1 << 20)
    service = FakeService(saying("a"), model=context_model)
    reply = call(app_over(service), "POST", "/tokenize", json={"messages": [message]})
    assert reply.json()["tokens"] == [5]
    assert seen[0].name.startswith("texts")


def test_encoding_lets_other_threads_run() -> None:
    """An encoder that held the interpreter would let the other thread run before and after it alone."""
    counter, ended = 0, threading.Event()

    def count() -> None:
        nonlocal counter
        while not ended.wait(0.0005):
            counter += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counter
        tokens = tokenizer().encode("Where is Emma? " * 100_000)
        assert counter - before > 5
    finally:
        ended.set()
        thread.join()
    assert len(tokens) > 100_000


@pytest.mark.parametrize("count", [0, 1, SLICE_ITEMS, SLICE_ITEMS + 1, 3 * SLICE_ITEMS])
def test_large_replies_are_those_of_starlette(count: int) -> None:
    body: dict[str, Any] = {
        "tokens": list(range(count)),
        "of": [{"é": [["a", None, 1.5, {}]] * count}, [], {}, "x"],
        "text": 'a"\\\n' * count,
    }
    assert asyncio.run(large_json(body)) == JSONResponse(body).body


async def posted(app: FastAPI, prompt: str, count: int) -> set[int]:
    replies = [exchange(app, "POST", "/tokenize", json={"prompt": prompt}) for _ in range(count)]
    return {reply.status_code for reply in await asyncio.gather(*replies)}


async def test_larger_bodies_are_checked_one_by_one_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in one iteration of the loop would delay streams by their sum."""
    checked: list[str] = []
    ended_s: list[float] = []

    async def check(body: bytes) -> None:
        del body
        time_s = asyncio.get_running_loop().time
        if ended_s:
            assert time_s() - ended_s[-1] >= 0.9 * middleware.PAUSE_S_MAX
        checked.append("begin")
        await asyncio.sleep(0.02)
        checked.append("end")
        ended_s.append(time_s())

    monkeypatch.setattr(middleware, "check_json_body", check)
    large = "a" * int(middleware.PAUSED_BYTES_PER_S * middleware.PAUSE_S_MAX)
    assert await posted(APP, large, 3) == {400}
    assert checked == ["begin", "end"] * 3


async def test_clients_with_larger_bodies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client's body waits for one or two of a flood, not for all of it."""
    checked: list[bytes] = []
    begun = asyncio.Event()

    async def check(body: bytes) -> None:
        checked.append(body[11:12])
        begun.set()

    monkeypatch.setattr(middleware, "check_json_body", check)
    app = app_over(FakeService(saying("a"), model=replace(MODEL, max_model_len=1 << 16)))

    async def post(address: str, letter: str) -> int:
        transport = httpx.ASGITransport(app, client=(address, 1))
        body = {"prompt": letter * (2 * PACED_BYTES_MIN)}
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return (await client.post("/tokenize", json=body)).status_code

    flood = [asyncio.create_task(post("10.0.0.1", "a")) for _ in range(20)]
    await begun.wait()
    others = [post(f"10.0.1.{client}", "b") for client in range(2)]
    assert {*await asyncio.gather(*flood, *others)} == {200}
    assert len(checked) == 22
    assert checked.index(b"b") <= 3
    assert checked[:8].count(b"b") == 2


async def test_bodies_that_wait_are_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waiting, checked = asyncio.Event(), asyncio.Event(), list[int]()
    pieces, bodies = 32, 4

    async def check(body: bytes) -> None:
        checked.append(len(body))
        begun.set()
        await waiting.wait()

    monkeypatch.setattr(middleware, "check_json_body", check)

    async def body() -> AsyncGenerator[bytes]:
        for _ in range(pieces):
            yield bytes(PIECE_BYTES)

    tracemalloc.start()
    try:
        posts = [
            asyncio.create_task(exchange(APP, "POST", "/tokenize", content=body())) for _ in range(bodies)
        ]
        await begun.wait()
        for _ in range(20 * pieces):
            await asyncio.sleep(0)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    waiting.set()
    await asyncio.gather(*posts)
    assert held_bytes < 1.5 * bodies * pieces * PIECE_BYTES
    assert checked == [pieces * PIECE_BYTES] * bodies


async def test_few_long_texts_are_tokenized_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0

    def encode(*_: object) -> MarkedPrompt:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return MarkedPrompt([5])

    def cores(process: int) -> set[int]:
        del process
        return {0, 1, 2, 3}

    monkeypatch.setattr(FolderTokenizer, "encode_marked", encode)
    monkeypatch.setattr("os.sched_getaffinity", cores)
    app = app_over(FakeService(saying("a"), model=replace(MODEL, max_model_len=1 << 16)))
    assert await posted(app, "a" * (INLINE_CHARS_MAX + 1), 12) == {200}
    assert most == 2, "half of the cores"
