"""Log lines: a JSON object each, with the fields that were promised; neither keys nor prompt text in them."""

import io
import json
import logging
from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.cluster.fake_service import FakeService, build_app, call, saying, sources, tokenizer
from tests.support.cluster.quiet import same_logs_afterwards
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.observability.logs import keeping, start_logs
from tidemill.cluster.observability.telemetry import QUIET, LogLevel, Telemetry

SECRET = "sk-not-to-be-told"  # noqa: S105 - made up
PROMPT = "zebra crossings at midnight"


@pytest.fixture(autouse=True)
def _same_logs() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    with same_logs_afterwards():
        yield


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
    assert (
        first.items()
        >= {
            "level": "INFO",
            "logger": "tidemill.some.part",
            "message": "two\nlines of text",
            "worker": "decode-0",
            "request_id": "r-1",
        }.items()
    )
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


def test_without_json_lines_are_for_people() -> None:
    stream = started(as_json=False)
    logging.getLogger("tidemill.x").info("hello")
    assert stream.getvalue().endswith(" INFO tidemill.x: hello\n")


def secured() -> FastAPI:
    keys = [ApiKey(tenant="acme", sha256=sha256(SECRET.encode()).hexdigest())]
    return build_app([ServedBackend(FakeService(saying(" ok")), tokenizer())], sources(), keys=keys)


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
    logged = [line for line in text.splitlines() if "tidemill.requests" in line]
    assert len(logged) == 1
    for secret in (SECRET, "zebra", "midnight", "pepper", "acme"):
        assert secret not in text
    assert "mine-1" in logged[0]
    if as_json:
        row = json.loads(logged[0])
        assert row["model"] == "keeper"
        assert row["finish"] == "stop"
        assert row["attempts"] == 1
        assert (row["prefill"], row["decode"]) == ("prefill-0.b", "decode-0.a")
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


def test_requests_are_logged_from_info_on() -> None:
    output = started("warning")
    ask(stream=False)
    assert not output.getvalue()


def test_lines_of_json_pass_ray_as_they_are() -> None:
    assert QUIET.environ() == {}
    assert Telemetry(log_json=True).environ().keys() == {"RAY_DISABLE_WORKER_LOG_PREFIX", "RAY_DEDUP_LOGS"}


def test_workers_know_a_request_by_the_clients_id() -> None:
    service = FakeService(saying(" ok"))
    app = build_app([ServedBackend(service, tokenizer())], sources())
    body = {"prompt": "Hello", "n": 2}
    for _ in range(2):
        call(app, "POST", "/v1/completions", json=body, headers={"x-request-id": "mine"})
    ids = [request.request_id for request in service.requests]
    assert all(request_id.startswith("mine.") for request_id in ids)
    assert len(set(ids)) == 4
