"""A client that disconnects ends its work immediately, at any moment; a slow one delays only its own
stream."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.cluster.fake_service import FakeService, app_over, exchange, saying, serving
from tests.support.sockets import connected, request_of
from tidemill.cluster.edge.http.stream import while_connected

PATH = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stall_at", [0, 2])
async def test_hanging_up_closes_every_generator(*, stream: bool, n: int, stall_at: int) -> None:
    service = FakeService(saying(" Emma is in the tower"), stall_at=stall_at)
    app = app_over(service)
    async with asyncio.timeout(60), serving(app) as url, connected(url) as (_, writer):
        writer.write(request_of(PATH, {"prompt": "a", "stream": stream, "n": n}))
        await service.stalled.wait()
        assert service.open_streams > 0
        writer.transport.abort()
        await service.idle.wait()
    assert service.open_streams == 0
    metrics = (await exchange(app, "GET", "/metrics")).text
    assert f'tidemill:request_success_total{{finished_reason="abort",model_name="keeper"}} {n}.0' in metrics
    assert 'tidemill:num_requests_running{model_name="keeper"} 0.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_open_answers_end_with_an_error_when_the_server_stops(*, stream: bool) -> None:
    """uvicorn cancels it. An answer that has begun ends with an event, another one with a status."""
    service = FakeService(saying(" Emma is in the tower"), stall_at=2)
    app = app_over(service)
    asking = asyncio.create_task(exchange(app, "POST", PATH, json={"prompt": "a", "stream": stream}))
    await service.stalled.wait()
    asking.cancel()
    reply = await asking
    assert service.open_streams == 0
    assert reply.status_code == (200 if stream else 503)
    before, _, last = reply.text.rpartition("event: error\ndata: ")
    assert bool(before) is stream
    error = json.loads(last)["error"]
    assert "this server stops" in error["message"]
    assert error["code"] == "unserved"
    assert 'tidemill:request_errors_total{code="503"} 1.0' in (await exchange(app, "GET", "/metrics")).text


async def test_bug_in_mid_stream_is_reported_to_the_client_and_in_the_log() -> None:
    service = FakeService(saying(" Emma is in the tower"), fail_at=2, failure=KeyError("secret"))
    app, body = app_over(service), {"prompt": "a", "stream": True}
    with pytest.raises(KeyError):
        await exchange(app, "POST", PATH, json=body)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        _, last = (await client.post(PATH, json=body)).text.split("event: error\n")
    assert "internal_error" in last
    assert "secret" not in last
    assert service.open_streams == 0


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
