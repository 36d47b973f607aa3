"""Streams read by a parser that is not ours: whatever an answer holds, its events carry it unharmed."""

import asyncio

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import FakeService, app_over, saying
from tidemill.workers.messages import Unserved

TRAPS = ["\n", "\r\n", "\r", "\u2028", "\u0085", "data: [DONE]", "\n\n", ": ", "event: error", "\0"]
TEXTS = st.lists(st.sampled_from(TRAPS) | st.text(min_size=1), min_size=1, max_size=8).map("".join)


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
