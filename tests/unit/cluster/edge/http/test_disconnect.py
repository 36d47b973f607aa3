"""A client that disconnects ends its work immediately, at any moment; a slow one delays only its own
stream."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import FakeService, app_over, exchange, saying
from tidemill.cluster.edge.http.stream import while_connected

PATH = "/v1/completions"


class Client:
    """A client of the bare ASGI application that hangs up when `hang_up` is set."""

    def __init__(self, body: dict[str, object]) -> None:
        self._body: bytes | None = json.dumps({"prompt": "a", **body}).encode()
        self.hang_up = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:  # noqa: ANN401 - as ASGI has it
        self.sent.append(message)

    async def ask(self, app: FastAPI) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await app(scope, self.receive, self.send)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stall_at", [0, 2])
async def test_hanging_up_closes_every_generator(*, stream: bool, n: int, stall_at: int) -> None:
    service = FakeService(saying(" Emma is in the tower"), stall_at=stall_at)
    app, client = app_over(service), Client({"stream": stream, "n": n})
    asking = asyncio.create_task(client.ask(app))
    await service.stalled.wait()
    assert service.open_streams > 0
    client.hang_up.set()
    await asking
    assert service.open_streams == 0
    assert not any(message.get("body") == b"data: [DONE]\n\n" for message in client.sent)
    metrics = (await exchange(app, "GET", "/metrics")).text
    assert f'tidemill:request_success_total{{finished_reason="abort",model_name="keeper"}} {n}.0' in metrics
    assert 'tidemill:num_requests_running{model_name="keeper"} 0.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_open_answers_end_with_an_error_when_the_server_stops(*, stream: bool) -> None:
    """uvicorn cancels it. An answer that has begun ends with an event, another one with a status."""
    service = FakeService(saying(" Emma is in the tower"), stall_at=2)
    app, client = app_over(service), Client({"stream": stream})
    asking = asyncio.create_task(client.ask(app))
    await service.stalled.wait()
    asking.cancel()
    await asking
    assert service.open_streams == 0
    start, *_, last = client.sent
    assert start["status"] == (200 if stream else 503)
    assert not last.get("more_body", False)
    text = last["body"].decode()
    assert text.startswith("event: error\ndata: " if stream else "{")
    error = json.loads(text[text.index("{") :])["error"]
    assert "this server stops" in error["message"]
    assert error["code"] == "unserved"
    assert 'tidemill:request_errors_total{code="503"} 1.0' in (await exchange(app, "GET", "/metrics")).text


async def test_bug_in_mid_stream_is_reported_to_the_client_and_in_the_log() -> None:
    service = FakeService(saying(" Emma is in the tower"), fail_at=2, failure=KeyError("secret"))
    client = Client({"stream": True})
    with pytest.raises(KeyError):
        await client.ask(app_over(service))
    last = client.sent[-1]["body"].decode()
    assert last.startswith("event: error\n")
    assert "internal_error" in last
    assert "secret" not in last
    assert service.open_streams == 0


async def test_incomplete_body_reaches_no_worker() -> None:
    service, client = FakeService(saying(" a")), Client({})
    parts = iter([{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": True}])

    async def receive() -> dict[str, Any]:
        return next(parts, {"type": "http.disconnect"})

    client.receive = receive
    await client.ask(app_over(service))
    assert client.sent == []
    assert service.requests == []


async def never() -> Any:  # noqa: ANN401 - as ASGI has it
    await asyncio.Event().wait()


async def test_work_that_fails_fails_for_its_caller_and_work_that_ends_is_returned() -> None:
    async def result(value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        return value

    assert await while_connected(never, result(7)) == 7
    with pytest.raises(ValueError, match="negative"):
        await while_connected(never, result(-1))


async def test_client_that_is_gone_already_starts_no_work() -> None:
    started: list[str] = []

    async def work() -> None:
        started.append("work")

    async def gone() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    assert await while_connected(gone, work()) is None
    cancelled = asyncio.create_task(while_connected(never, work()))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not started
