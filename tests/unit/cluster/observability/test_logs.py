"""Log lines: a JSON object each, without keys and prompt text; an idle worker is silent."""

import asyncio
import io
import json
import logging
from collections import deque
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.observability import worker_line
from tidemill.cluster.observability.logs import keeping, start_logs
from tidemill.cluster.observability.telemetry import LogLevel, Telemetry
from tidemill.cluster.observability.worker_line import line_of, log_lines
from tidemill.workers.messages import NO_MEMORY, WorkerLoad

SECRET = "sk-not-to-be-told"  # noqa: S105 - made up
PROMPT = "zebra crossings at midnight"


def started(level: LogLevel = "info", *, as_json: bool = True, **always: str) -> io.StringIO:
    stream = io.StringIO()
    start_logs(Telemetry(log_level=level, log_json=as_json), stream, **always)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_is_an_object() -> None:
    stream = started(worker="decode-0")
    log = logging.getLogger("tidemill.some.part")
    log.info("two\nlines of %s", "text", extra={"request_id": "r-1"})
    try:
        raise ValueError("out of luck")
    except ValueError:
        log.exception("it broke")
    first, second = lines(stream)
    known = {"level": "INFO", "logger": "tidemill.some.part", "message": "two\nlines of text"}
    assert first.items() >= {**known, "worker": "decode-0", "request_id": "r-1"}.items()
    assert first["ts"].endswith("+00:00")
    assert first["pid"] > 0
    assert "ValueError: out of luck" in second["error"]


@pytest.mark.parametrize("as_json", [False, True])
def test_error_of_a_request_is_logged_without_its_words(*, as_json: bool) -> None:
    """Words of clients stand in messages of exceptions, and in those that they came from."""
    stream, kept = started(as_json=as_json), deque[str]()
    with keeping(kept):
        for name in ("uvicorn.error", "tidemill.cluster.edge.grpc_api.generation", "asyncio"):
            try:
                try:
                    {}[PROMPT]
                except KeyError as error:
                    raise ExceptionGroup(PROMPT, [ValueError(f"{PROMPT} \ud800")]) from error
            except ExceptionGroup:
                logging.getLogger(name).exception("a call \ud800 broke")
    for log in (stream.getvalue(), "\n".join(kept)):
        assert all(kind in log for kind in ("KeyError", "ExceptionGroup", "ValueError", "test_logs.py"))
        assert PROMPT not in log
    "\n".join(kept).encode()


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_level_is_that_of_our_own_loggers(level: LogLevel, count: int) -> None:
    stream = started(level)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("tidemill.x").log(number, "ours")
    assert len(lines(stream)) == count
    logging.getLogger("other").info("theirs")
    assert len(lines(stream)) == count
    logging.getLogger("other").warning("theirs")
    assert len(lines(stream)) == count + 1


def secured() -> FastAPI:
    keys = [ApiKey(tenant="acme", sha256=sha256(SECRET.encode()).hexdigest())]
    return app_over(FakeService(saying(" ok")), keys=keys)


def ask(*, stream: bool, **body: object) -> None:
    app = secured()
    response = call(
        app,
        "POST",
        "/v1/completions",
        json={"prompt": PROMPT, "stream": stream, **body},
        headers={"authorization": f"Bearer {SECRET}", "x-request-id": "mine-1"},
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_request_leaves_one_line_without_its_text(*, as_json: bool, stream: bool) -> None:
    output = started("debug", as_json=as_json)
    ask(stream=stream, cache_salt="pepper")
    text = output.getvalue()
    [logged] = [line for line in text.splitlines() if "tidemill.requests" in line]
    for secret in (SECRET, "zebra", "midnight", "pepper", "acme"):
        assert secret not in text
    assert "mine-1" in logged
    if as_json:
        row = json.loads(logged)
        given = {name: row[name] for name in ("model", "finish", "attempts", "prefill", "decode")}
        assert list(given.values()) == ["keeper", "stop", 1, "prefill-0.b", "decode-0.a"]
        assert row["prompt_tokens"] > 1
        assert row["prompt_tokens_details"]["cached_tokens"] > 0
        assert 0 < row["ttft_s"] <= row["e2e_s"]
        assert len(row["tenant"]) == 16


def test_refused_key_is_not_logged() -> None:
    output = started("debug")
    app = secured()
    for header in ("Bearer sk-wrong-one", "Basic sk-wrong-one"):
        headers = {"authorization": header}
        response = call(app, "POST", "/v1/completions", json={"prompt": PROMPT}, headers=headers)
        assert response.status_code == 401
    assert "sk-wrong" not in output.getvalue()
    assert "zebra" not in output.getvalue()


def test_workers_know_a_request_by_the_clients_id() -> None:
    service = FakeService(saying(" ok"))
    app = app_over(service)
    body = {"prompt": "Hello", "n": 2}
    for _ in range(2):
        call(app, "POST", "/v1/completions", json=body, headers={"x-request-id": "mine"})
    ids = [request.request_id for request in service.requests]
    assert all(request_id.startswith("mine.") for request_id in ids)
    assert len(set(ids)) == 4


MIB = 1 << 20
IDLE = WorkerLoad(
    memory=NO_MEMORY | {"pages_cached": 3 * MIB, "free": MIB},
    budget_bytes=64 * MIB,
    state_slots=0,
    counters={"steps": 5.0, "generated_tokens": 100.0, "computed_tokens": 40.0},
)
BUSY = replace(
    IDLE,
    running_rows=3,
    waiting_rows=2,
    memory=NO_MEMORY | {"pages_live": 2 * MIB, "pages_cached": MIB, "states_live": MIB // 2},
    counters={
        **IDLE.counters,
        "steps": 900.0,
        "generated_tokens": 350.0,
        "computed_tokens": 1040.0,
        "prefix_queried_tokens": 640.0,
        "prefix_resumed_tokens": 160.0,
    },
)


def test_line_has_rates_of_the_interval() -> None:
    assert line_of(IDLE, BUSY, 10.0) == (
        "prompt throughput: 100.0 tokens/s, generation throughput: 25.0 tokens/s, running: 3 reqs,"
        " waiting: 2 reqs, memory: pages 2.0 live + 1.0 cached, states 0.5 live + 0.0 cached of 64.0 MiB,"
        " prefix cache hit rate: 25.0%"
    )


def test_line_has_the_most_that_torch_has_held_of_a_device() -> None:
    busy = replace(BUSY, counters=BUSY.counters | {"torch_reserved_peak_bytes": 3.5 * MIB})
    line = line_of(IDLE, busy, 10.0)
    assert line is not None
    assert line.endswith("hit rate: 25.0%, reserved by torch at most: 3.5 MiB")


def test_idle_worker_is_silent_though_it_steps() -> None:
    assert line_of(IDLE, replace(IDLE, counters=IDLE.counters | {"steps": 77.0}), 10.0) is None
    assert line_of(IDLE, replace(IDLE, budget_bytes=32 * MIB), 10.0) is not None
    assert line_of(BUSY, IDLE, 10.0) is not None
    line = line_of(BUSY, BUSY, 10.0)  # its requests stand still
    assert line is not None
    assert "generation throughput: 0.0 tokens/s, running: 3 reqs" in line
    assert line.endswith("hit rate: -")


async def test_lines_come_until_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_line, "LINE_S", 0.0)
    loads = iter([IDLE, IDLE, BUSY])
    with caplog.at_level(logging.INFO, worker_line.log.name):
        lines = asyncio.create_task(log_lines("decode-0", lambda: next(loads, IDLE)))
        while len(caplog.records) < 2:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0)
        lines.cancel()
    busy, idle = (record.message for record in caplog.records[:2])
    assert busy.startswith("decode-0: prompt throughput: ")
    assert "running: 3 reqs" in busy
    assert "running: 0 reqs" in idle
