"""Tokenizing over HTTP, and the probes."""

import asyncio
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

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    call,
    saying,
    serving,
    tokenizer,
    worker_status,
)
from tidemill.cluster.edge.apis.json_bytes import SLICE_ITEMS, large_json
from tidemill.cluster.edge.chat.text import SLICE_TOKENS, MarkedPrompt, text_of
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.http import middleware
from tidemill.cluster.edge.http.middleware import PACED_BYTES_MIN
from tidemill.cluster.edge.requests.bodies import MESSAGES_MAX
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
    model = replace(MODEL, cold_start_s_max=300.0)
    idle = app_over(FakeService(saying("a"), workers=(), model=model))
    assert call(idle, "GET", "/health").status_code == 200, "or no request would come and start it"
    assert call(APP, "GET", "/load").json() == {"server_load": 0}


def test_text_beyond_any_tokens_of_the_model_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = MODEL.max_model_len * tokenizer().token_chars_max
    status, found = post("/tokenize", prompt="a" * most)
    assert (status, found["count"] > 0) == (200, True)
    short = tokenizer().encode("a")

    def encode(_: object, text: str) -> list[int]:
        assert text == "a"
        return short

    monkeypatch.setattr(FolderTokenizer, "encode", encode)
    monkeypatch.setattr(FolderTokenizer, "chat", encode)
    halves = [{"role": "user", "content": "a" * (most // 2 + 1)}] * 2
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/tokenize", {"prompt": "a" * (most + 1)}),
        ("/tokenize", {"messages": halves}),
        ("/v1/completions", {"prompt": ["a", "a" * (most + 1)]}),
        ("/v1/chat/completions", {"messages": halves}),
    ]
    for path, body in bodies:
        status, error = post(path, **body)
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


LONG = "a" * (MODEL.max_model_len * 20)
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
CALL = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}


@pytest.mark.parametrize("more", [{"tools": [TOOL]}, {"tool_calls": [CALL]}], ids=["tools", "calls"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_chat_is_not_tokenized_if_tools_or_calls_make_it_too_long(
    path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoding(*_: object, **options: object) -> None:
        raise AssertionError(options)

    monkeypatch.setattr(FolderTokenizer, "_encoding", encoding)
    message = {"role": "assistant", "content": "a", **{k: v for k, v in more.items() if k != "tools"}}
    tools = {"tools": more["tools"]} if "tools" in more else {}
    status, error = post(path, messages=[message], **tools)
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


def test_messages_are_bounded() -> None:
    for path in ("/tokenize", "/v1/chat/completions"):
        status, error = post(path, messages=[{"role": "user", "content": ""}] * (MESSAGES_MAX + 1))
        assert (status, error["error"]["param"]) == (400, "messages")


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
    body = {"prompt": "a" * int(middleware.PAUSED_BYTES_PER_S * middleware.PAUSE_S_MAX)}

    async with serving(APP) as url, httpx.AsyncClient(base_url=url) as client:
        replies = [client.post("/tokenize", json=body) for _ in range(3)]
        assert {reply.status_code for reply in await asyncio.gather(*replies)} == {400}
    assert checked == ["begin", "end"] * 3


async def test_clients_with_larger_bodies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client's body waits for one or two of a flood, not for all of it."""
    checked: list[bytes] = []
    begun = asyncio.Event()

    async def check(body: bytes) -> None:
        checked.append(body[11:12])
        begun.set()

    monkeypatch.setattr(middleware, "check_json_body", check)

    async def post(app: FastAPI, address: str, letter: str) -> int:
        transport = httpx.ASGITransport(app, client=(address, 1))
        body = {"prompt": letter * (2 * PACED_BYTES_MIN)}
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return (await client.post("/tokenize", json=body)).status_code

    app = app_over(FakeService(saying("a"), model=replace(MODEL, max_model_len=1 << 16)))
    flood = [asyncio.create_task(post(app, "10.0.0.1", "a")) for _ in range(20)]
    await begun.wait()
    others = [post(app, f"10.0.1.{client}", "b") for client in range(2)]
    assert {*await asyncio.gather(*flood, *others)} == {200}
    assert len(checked) == 22
    assert checked.index(b"b") <= 3
    assert checked[:8].count(b"b") == 2


def test_bodies_that_wait_are_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waiting, checks = asyncio.Event(), asyncio.Event(), 0
    pieces, bodies = 32, 4

    async def check(body: bytes) -> None:
        nonlocal checks
        checks += 1
        assert len(body) == pieces * PIECE_BYTES
        begun.set()
        await waiting.wait()

    monkeypatch.setattr(middleware, "check_json_body", check)

    async def body() -> AsyncGenerator[bytes]:
        for _ in range(pieces):
            yield bytes(PIECE_BYTES)

    async def main() -> int:
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            tracemalloc.start()
            try:
                posts = [asyncio.create_task(client.post("/tokenize", content=body())) for _ in range(bodies)]
                await begun.wait()
                for _ in range(20 * pieces):
                    await asyncio.sleep(0)
                held_bytes, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            waiting.set()
            await asyncio.gather(*posts)
        return held_bytes

    assert asyncio.run(main()) < 1.5 * bodies * pieces * PIECE_BYTES
    assert checks == bodies


async def test_few_long_texts_are_tokenized_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0

    def encode(self: FolderTokenizer, text: str, ends: object) -> MarkedPrompt:
        del self, text, ends
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return MarkedPrompt([5])

    monkeypatch.setattr(FolderTokenizer, "encode_marked", encode)

    def cores(process: int) -> set[int]:
        del process
        return {0, 1, 2, 3}

    monkeypatch.setattr("os.sched_getaffinity", cores)
    app = app_over(FakeService(saying("a"), model=replace(MODEL, max_model_len=1 << 16)))

    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "a" * (INLINE_CHARS_MAX + 1)}
        replies = [client.post("/tokenize", json=body) for _ in range(12)]
        assert {reply.status_code for reply in await asyncio.gather(*replies)} == {200}
    assert most == 2, "half of the cores"
