"""A traced cluster that logs JSON: one trace over three processes, a line for each request, no text in it."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.collector import Collector, Span, collecting
from tests.e2e.server import Server, eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENTS_SPAN = "b7ad6b7169203331"
PROMPT = "The zebra crosses at midnight. " * 40
FRONTEND = ("request text", "route", "prefill", "fetch ahead", "decode")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("telemetry") / "log"


@pytest.fixture(scope="module")
def server(log_file: Path, collector: Collector) -> Iterator[Server]:
    server = Server(
        [
            *("keeper", "--port", "0", "--memory", "64MiB", "--page-size", "16"),
            *("--log-json", "--metrics-alias", "vllm", "--otlp-traces-endpoint", collector.url),
        ],
        log_file,
    )
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def ask(server: Server, trace: str, sampled: str = "01", **body: object) -> dict[str, Any]:
    reply = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "keeper", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, **body},
        headers={"traceparent": f"00-{trace}-{CLIENTS_SPAN}-{sampled}", "x-request-id": f"mine-{trace[:4]}"},
        timeout=300,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def spans_of(
    collector: Collector, trace: str, last: frozenset[str] = frozenset(("request text", "stream"))
) -> dict[tuple[str, str], Span]:
    """By process and name, once the `last` ones are there."""

    def all_there() -> bool:
        return last <= {one.name for one in collector.of(trace)}

    eventually(all_there)
    found = collector.of(trace)
    assert max(Counter((one.process, one.name) for one in found).values()) == 1
    return {(one.process, one.name): one for one in found}


def test_a_request_is_one_trace_over_three_processes(server: Server, collector: Collector) -> None:
    usage = ask(server, TRACE)["usage"]
    spans = spans_of(
        collector, TRACE, frozenset(("request text", "generate", "produce", "stream", "publish"))
    )
    assert {process for process, _ in spans} == {"frontend", "prefill-0", "decode-0"}
    root = spans["frontend", "request text"]
    assert root.parent == CLIENTS_SPAN
    for name in ("route", "prefill", "decode"):
        assert spans["frontend", name].parent == root.span
    produce, generate = spans["prefill-0", "produce"], spans["decode-0", "generate"]
    assert produce.parent == spans["frontend", "prefill"].span
    assert generate.parent == spans["frontend", "decode"].span
    for name in ("compute", "publish"):
        assert spans["prefill-0", name].parent == produce.span
    for name in ("tail", "stream"):
        assert spans["decode-0", name].parent == generate.span
    order = [
        spans[one].start_ns
        for one in (("frontend", "route"), ("frontend", "prefill"), ("frontend", "decode"))
    ]
    assert order == sorted(order)
    for one in spans.values():
        assert one.start_ns <= one.end_ns
        assert not one.failed
    assert "first token" in spans["frontend", "decode"].events
    assert "first token" in generate.events
    tokens, depth = usage["prompt_tokens"], (usage["prompt_tokens"] - 1) // 16 * 16
    assert root.attributes["gen_ai.usage.input_tokens"] == tokens
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.request.id"] == f"mine-{TRACE[:4]}"
    assert produce.attributes["tidemill.depth_tokens"] == depth
    assert produce.attributes["tidemill.computed_tokens"] == depth
    assert generate.attributes["tidemill.hit_depth_tokens"] == depth
    assert generate.attributes["tidemill.hit_pages"] == depth // 16
    assert generate.attributes["tidemill.computed_tokens"] == tokens - depth
    assert "zebra" not in repr(collector.spans)


def test_what_a_client_does_not_sample_is_not_sent(server: Server, collector: Collector) -> None:
    unwanted, wanted = "1" * 32, "2" * 32
    ask(server, unwanted, sampled="00")
    ask(server, wanted, prompt=PROMPT[5:])
    spans_of(collector, wanted)
    assert not collector.of(unwanted)


def test_every_line_is_an_object_and_each_request_has_one(server: Server, log_file: Path) -> None:
    ask(server, "3" * 32)
    eventually(lambda: "mine-3333" in log_file.read_text())  # it is written after the answer
    text = log_file.read_text()
    lines = [json.loads(line) for line in text.splitlines() if "(raylet)" not in line]  # Ray's own, if at all
    (row,) = [line for line in lines if line.get("request_id") == "mine-3333"]
    assert row["logger"] == "tidemill.requests"
    assert row["decode"].startswith("decode-0.")
    assert row["completion_tokens"] == 8
    assert row["prompt_tokens_details"]["cached_tokens"] > 0
    assert 0 < row["ttft_s"] <= row["e2e_s"]
    assert "zebra" not in log_file.read_text()


def test_the_alias_is_scraped(server: Server) -> None:
    fetched = 'tidemill:worker_fetched_bytes_total{model_name="keeper",role="decode",worker="decode-0"}'
    ask(server, "4" * 32)

    def scraped() -> str:
        return httpx.get(f"{server.url}/metrics", timeout=300).text

    eventually(lambda: fetched in scraped())  # the next heartbeat tells
    text = scraped()
    for name in ("tidemill:", "vllm:"):
        assert f'{name}request_success_total{{finished_reason="length",model_name="keeper"}}' in text
        assert f'{name}request_queue_time_seconds_count{{model_name="keeper"}}' in text
