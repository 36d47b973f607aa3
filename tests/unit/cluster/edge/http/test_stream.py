"""Streams read by a parser that is not ours: whatever an answer holds, its events carry it unharmed."""

import asyncio
from collections.abc import Mapping

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.cluster.fake_service import (
    TRACE,
    FakeService,
    app_over,
    saying,
    scored,
    serving,
    tokenizer,
)
from tests.support.sockets import connected, request_of, until_closed
from tidemill.cluster.edge.apis.json_bytes import event
from tidemill.cluster.edge.apis.openai import Chunks, Kind, ReplyHead, chunk_choice
from tidemill.cluster.edge.chat.output.detokenizer import Answer, Ending
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.bodies import StreamOptions
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.usage import UsageCounter
from tidemill.workers.messages import Request, Unserved

TRAPS = ["\n", "\r\n", "\r", "\u2028", "\u0085", "data: [DONE]", "\n\n", ": ", "event: error", "\0"]
TEXTS = st.lists(st.sampled_from(TRAPS) | st.text(min_size=1), min_size=1, max_size=8).map("".join)

REQUEST = Request(request_id="r", tokens=(5, 6), max_new_tokens=64)
VOCAB = 896
LOGPROBS = 2
NAMES = st.sampled_from(["keeper", 'with "quotes"', "\0", '"\\u0000"', "m\u00fchle"])


async def events_of(service: FakeService) -> list[ServerSentEvent]:
    transport = httpx.ASGITransport(app_over(service))
    body = {"prompt": "Hello", "stream": True, "max_tokens": 200, "ignore_eos": True}
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://edge") as client,
        aconnect_sse(client, "POST", "/v1/completions", json=body) as source,
    ):
        return [received async for received in source.aiter_sse()]


@settings(max_examples=40, deadline=None)
@given(text=TEXTS, per_piece=st.integers(1, 5))
def test_any_text_comes_through(text: str, per_piece: int) -> None:
    *chunks, done = asyncio.run(events_of(FakeService(saying(text, eos=False), per_piece=per_piece)))
    assert done.data == "[DONE]"
    assert {chunk.event for chunk in chunks} == {"message"}
    received = "".join(choice["text"] for chunk in chunks for choice in chunk.json()["choices"])
    assert received == text[: len(received)]
    assert received == text or len(text) > len(received) > 0


@settings(max_examples=10, deadline=None)
@given(text=TEXTS)
def test_any_error_comes_through(text: str) -> None:
    service = FakeService(saying(" Emma is in the tower"), fail_at=1, failure=Unserved(text))
    *_, last = asyncio.run(events_of(service))
    assert last.event == "error"
    assert text in last.json()["error"]["message"]


class _WithoutWriter:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "extensions": {}}, receive, send)


def received(service: FakeService, path: str, body: Mapping[str, object], *, by_asgi: bool = False) -> bytes:
    """Return the body of a reply as it comes over a socket, with the heads of its chunks. With `by_asgi` the
    server sends all of it, as one that is not ours does."""

    async def main() -> bytes:
        app = app_over(service)
        if by_asgi:
            app.add_middleware(_WithoutWriter)
        async with serving(app) as url, connected(url) as (reader, writer):
            writer.write(request_of(path, {**body, "stream": True}, connection="close"))
            head, _, rest = (await until_closed(reader)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head + rest
            return rest

    return asyncio.run(main())


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    per_piece=st.sampled_from([1, 1, 1, 2]),
    is_chat=st.booleans(),
    stop=st.sampled_from([[], ["e"], ["in the", "x"]]),
    counts=st.booleans(),
    echo=st.booleans(),
    fail_at=st.sampled_from([None, None, 3]),
)
def test_chunks_past_asgi_are_the_same_bytes(
    tokens: list[int],
    per_piece: int,
    is_chat: bool,  # noqa: FBT001
    stop: list[str],
    counts: bool,  # noqa: FBT001
    echo: bool,  # noqa: FBT001
    fail_at: int | None,
) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "Hello"}
    options = {"include_usage": True, "continuous_usage_stats": counts}
    body = {**asked, "max_tokens": len(tokens), "stop": stop, "stream_options": options}
    if echo and not is_chat:
        body["echo"] = True
    service = FakeService(lambda _: tokens, per_piece=per_piece, fail_at=fail_at)
    assert received(service, path, body) == received(service, path, body, by_asgi=True)


def test_choices_past_asgi_are_the_same() -> None:
    def of_choices(*, by_asgi: bool) -> list[list[str]]:
        body = {"prompt": "a", "n": 3, "max_tokens": 20}
        text = received(service, "/v1/completions", body, by_asgi=by_asgi).decode()
        lines = [line for line in text.splitlines() if line.startswith("data: {")]
        return [[line for line in lines if f'"index":{choice},' in line] for choice in range(3)]

    service = FakeService(saying(" Emma is in the tower. The code of Tina is 6869.", eos=False))
    assert of_choices(by_asgi=False) == of_choices(by_asgi=True)


@st.composite
def increments(draw: st.DrawFn, kind: Kind, choices: int) -> list[Increment]:
    """Answers of random tokens: halves of characters, special tokens, stop strings, several in one delta."""
    ending = Ending(stops=draw(st.sampled_from([(), ("e",), ("in the", "x")])))
    answers = [Answer(REQUEST, tokenizer().decoder(()), ending) for _ in range(choices)]
    running = set(range(choices))
    found: list[Increment] = []
    for _ in range(draw(st.integers(1, 12))):
        if not running:
            break
        choice = draw(st.sampled_from(sorted(running)))
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
        logprobs = [scored(token, LOGPROBS) for token in tokens] if draw(st.booleans()) else []
        growth = answers[choice].push(tokens, logprobs, draw(st.sampled_from([None, None, None, "length"])))
        if growth.finish is not None:
            running.discard(choice)
        parts: list[Part] = []
        if kind == "chat":
            others: list[Part] = [ReasoningText("why"), Call(0, "look", "{"), Text("\0")]
            some = st.lists(st.sampled_from(others), max_size=3)
            parts = [Text(growth.text)] if draw(st.booleans()) else draw(some)
        found.append(Increment(choice=choice, growth=growth, trace=TRACE, tokens=tokens, parts=parts))
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["text", "chat"]), choices=st.integers(1, 3), model=NAMES)
def test_both_ways_write_the_same_bytes(data: st.DataObject, kind: Kind, choices: int, model: str) -> None:
    options = StreamOptions(
        include_usage=data.draw(st.booleans()), continuous_usage_stats=data.draw(st.booleans())
    )
    head = ReplyHead(kind=kind, reply_id="cmpl-1", created_s=1, model=model, piece=tokenizer().piece)
    job = PreparedRequest(requests=(REQUEST,) * choices, n=choices, ending=Ending(), logprobs=False)
    tally = UsageCounter(job)
    written = Chunks(head, options, tally, job)
    for increment in data.draw(increments(kind, choices)):
        tally.record(increment)
        chunk = head.chunk([chunk_choice(head, increment)])
        if options.continuous_usage_stats:
            chunk["usage"] = tally.usage()
        elif options.include_usage:
            chunk["usage"] = None
        assert written.grow(increment) == (event(chunk),)
