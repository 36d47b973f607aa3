"""Streams read by a parser that is not ours: whatever an answer holds, its events carry it unharmed."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    EOS,
    TRACE,
    FakeService,
    app_over,
    saying,
    scored,
    serving,
    tokenizer,
)
from tests.support.sockets import connected, until_closed
from tidemill.cluster.edge.chat.output.detokenizer import Answer, Ending
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.cluster.edge.http.replies import ChunkEvents, Kind, ReplyHead, chunk_choice
from tidemill.cluster.edge.http.stream import event
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.bodies import StreamOptions
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.usage import UsageCounter
from tidemill.cluster.messages import TokenSink
from tidemill.workers.messages import Request, StreamPiece, Unserved

TRAPS = ["\n", "\r\n", "\r", "\u2028", "\u0085", "data: [DONE]", "\n\n", ": ", "event: error", "\0"]
TEXTS = st.lists(st.sampled_from(TRAPS) | st.text(min_size=1), min_size=1, max_size=8).map("".join)

REQUEST = Request(request_id="r", tokens=(5, 6), max_new_tokens=64)
VOCAB = 896
LOGPROBS = 2
NAMES = st.sampled_from(["keeper", 'with "quotes"', "\0", '"\\u0000"', "m\u00fchle"])


def events(service: FakeService) -> list[ServerSentEvent]:
    async def main() -> list[ServerSentEvent]:
        transport = httpx.ASGITransport(app_over(service))
        body = {"prompt": "Hello", "stream": True, "max_tokens": 200, "ignore_eos": True}
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://edge") as client,
            aconnect_sse(client, "POST", "/v1/completions", json=body) as source,
        ):
            return [received async for received in source.aiter_sse()]

    return asyncio.run(main())


@settings(max_examples=40, deadline=None)
@given(text=TEXTS, per_piece=st.integers(1, 5))
def test_any_text_comes_through(text: str, per_piece: int) -> None:
    *chunks, done = events(FakeService(saying(text, eos=False), per_piece=per_piece))
    assert done.data == "[DONE]"
    assert {chunk.event for chunk in chunks} == {"message"}
    received = "".join(choice["text"] for chunk in chunks for choice in chunk.json()["choices"])
    assert received == text[: len(received)]
    assert received == text or len(text) > len(received) > 0


@settings(max_examples=10, deadline=None)
@given(text=TEXTS)
def test_any_error_comes_through(text: str) -> None:
    service = FakeService(saying(" Emma is in the tower"), fail_at=1, failure=Unserved(text))
    *_, last = events(service)
    assert last.event == "error"
    assert text in last.json()["error"]["message"]


class ByTheStream(FakeService):
    """A service that leaves no token to a sink."""

    def generate(self, request: Request, sink: TokenSink | None = None) -> AsyncGenerator[StreamPiece]:
        del sink
        return super().generate(request)


def received(service: FakeService, path: str, body: Mapping[str, object]) -> bytes:
    """Return the body of a reply as it comes over a socket, with the heads of its chunks."""

    async def main() -> bytes:
        data = json.dumps({**body, "stream": True}).encode()
        about = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        async with serving(app_over(service)) as url, connected(url) as (reader, writer):
            writer.write(f"POST {path} HTTP/1.1\r\n{about}\r\nconnection: close\r\n\r\n".encode() + data)
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
def test_tokens_that_a_sink_takes_are_the_same_bytes(
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
    sinking, streaming = (
        kind(lambda _: tokens, per_piece=per_piece, fail_at=fail_at) for kind in (FakeService, ByTheStream)
    )
    assert received(sinking, path, body) == received(streaming, path, body)
    assert streaming.sunk == 0
    plain = range(1, (fail_at or len(tokens)) - 1)
    ends = EOS in tokens or bool(stop) or fail_at is not None
    assert ends or per_piece > 1 or sinking.sunk == len(plain)


def test_choices_whose_tokens_a_sink_takes_are_the_same() -> None:
    def of_choices(service: FakeService) -> list[list[str]]:
        text = received(service, "/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 20}).decode()
        lines = [line for line in text.splitlines() if line.startswith("data: {")]
        return [[line for line in lines if f'"index":{choice},' in line] for choice in range(3)]

    script = saying(" Emma is in the tower. The code of Tina is 6869.", eos=False)
    sinking, streaming = FakeService(script), ByTheStream(script)
    assert of_choices(sinking) == of_choices(streaming)
    assert sinking.sunk > 0


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
    written = ChunkEvents(head, options, tally)
    for increment in data.draw(increments(kind, choices)):
        tally.record(increment)
        chunk = head.chunk([chunk_choice(head, increment)])
        if options.continuous_usage_stats:
            chunk["usage"] = tally.usage()
        elif options.include_usage:
            chunk["usage"] = None
        assert written.event(increment) == event(chunk)
