"""One real server with every edge: a trace over three processes, a line of JSON for each request, no text in
it; gRPC beside HTTP with equal tokens, certificates between its processes, no strangers."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import trustme

from tests.support.e2e.collector import Collector, attributes_of, collecting
from tests.support.e2e.server import EVENTUALLY_S_MAX, NO_TLS, Server, eventually, listening_of
from tests.support.e2e.streams import completion
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import open_channel
from tidemill.cluster.rpc.codec import Hello, encode_client_frame
from tidemill.cluster.rpc.proto import generation_pb2 as pb
from tidemill.workers.messages import WorkerId

pytestmark = IN_GRPC_LOOP

STORY = "The keeper of the lighthouse said that " * 8
TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENTS_SPAN = "b7ad6b7169203331"
PROMPT = "The zebra crosses at midnight. " * 40


@dataclass(frozen=True)
class Edge:
    """A server, what its processes show each other, and who gets their traces."""

    server: Server
    tls: MutualTls
    collector: Collector

    @property
    def grpc_address(self) -> str:
        found = re.search(r'gRPC on ([^\s"]+)', self.server.log())
        assert found is not None
        return found[1]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")
    tls = issue(folder / "tls", trustme.CA())
    arguments = ["keeper", "--port", "0", "--prefill", "1", "--decode", "1", "--grpc-port", "0"]
    arguments += ["--memory", "64MiB", "--page-size", "16"]
    arguments += ["--cluster-ssl-certfile", str(tls.certificate), "--cluster-ssl-keyfile", str(tls.key)]
    arguments += ["--cluster-ssl-ca-certs", str(tls.ca)]
    arguments += ["--log-level", "debug", "--log-json", "--metrics-alias", "vllm"]
    with collecting() as collector:
        arguments += ["--otlp-traces-endpoint", collector.url]
        with Server(arguments, folder / "log") as server:
            yield Edge(server, tls, collector)


def post(edge: Edge, headers: dict[str, str], **body: object) -> httpx.Response:
    url = f"{edge.server.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=EVENTUALLY_S_MAX, verify=NO_TLS)


def over_http(edge: Edge, headers: dict[str, str], **body: object) -> dict[str, Any]:
    reply = post(edge, headers, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(edge: Edge, trace: str, sampled: str = "01", prompt: str = PROMPT) -> dict[str, Any]:
    headers = {"traceparent": f"00-{trace}-{CLIENTS_SPAN}-{sampled}", "x-request-id": f"mine-{trace[:4]}"}
    return over_http(edge, headers, **completion(prompt, 8))


def spans_of(edge: Edge, trace: str, *last: str) -> dict[tuple[str, str], Any]:
    """Return the spans of a trace by process and name, once the `last` ones have arrived."""
    eventually(lambda: {*last} <= {name for _, name in edge.collector.of(trace)})
    return edge.collector.of(trace)


def test_request_is_one_trace_over_three_processes(edge: Edge) -> None:
    usage = ask(edge, TRACE)["usage"]
    spans = spans_of(edge, TRACE, "request text", "generate", "produce", "stream", "publish")
    assert {process for process, _ in spans} == {"frontend", "prefill-0", "decode-0"}
    root, route, prefill, decode = (
        spans["frontend", name] for name in ("request text", "route", "prefill", "decode")
    )
    assert root.parent_span_id.hex() == CLIENTS_SPAN
    produce, generate = spans["prefill-0", "produce"], spans["decode-0", "generate"]
    for parent, *children in (
        (root, route, prefill, decode),
        (prefill, produce),
        (decode, generate),
        (produce, *(spans["prefill-0", name] for name in ("compute", "publish"))),
        (generate, *(spans["decode-0", name] for name in ("tail", "stream"))),
    ):
        assert {child.parent_span_id for child in children} == {parent.span_id}
    assert route.start_time_unix_nano <= prefill.start_time_unix_nano <= decode.start_time_unix_nano
    for span in spans.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.status.code != span.status.STATUS_CODE_ERROR
    for span in (decode, generate):
        assert "first token" in {event.name for event in span.events}
    tokens, depth = usage["prompt_tokens"], (usage["prompt_tokens"] - 1) // 16 * 16
    asked = {
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.request.id": f"mine-{TRACE[:4]}",
    }
    restored = {"tidemill.hit_depth_tokens": depth, "tidemill.hit_pages": depth // 16}
    for span, attributes in (
        (root, asked),
        (produce, {"tidemill.depth_tokens": depth, "tidemill.computed_tokens": depth}),
        (generate, restored | {"tidemill.computed_tokens": tokens - depth}),
    ):
        assert attributes.items() <= attributes_of(span).items()
    assert "zebra" not in repr(edge.collector.spans)


def test_request_that_the_client_does_not_sample_sends_no_spans(edge: Edge) -> None:
    unwanted, wanted = "1" * 32, "2" * 32
    ask(edge, unwanted, sampled="00")
    ask(edge, wanted, prompt=PROMPT[5:])
    spans_of(edge, wanted, "request text", "stream")
    assert not edge.collector.of(unwanted)


def test_log_lines_are_objects_and_each_request_has_one(edge: Edge) -> None:
    ask(edge, "3" * 32)
    eventually(lambda: "mine-3333" in edge.server.log())  # it is written after the answer
    text = edge.server.log()
    lines = [json.loads(line) for line in text.splitlines() if "(raylet)" not in line]  # Ray's own, if at all
    (row,) = [line for line in lines if line.get("request_id") == "mine-3333"]
    assert row["logger"] == "tidemill.requests"
    assert row["decode"].startswith("decode-0.")
    assert row["completion_tokens"] == 8
    assert row["prompt_tokens_details"]["cached_tokens"] > 0
    assert 0 < row["ttft_s"] <= row["e2e_s"]
    assert "zebra" not in edge.server.log()


def test_metrics_alias_is_scraped(edge: Edge) -> None:
    fetched = 'tidemill:worker_fetched_bytes_total{model_name="keeper",role="decode",worker="decode-0"}'
    ask(edge, "4" * 32)

    def scraped() -> str:
        return httpx.get(f"{edge.server.url}/metrics", timeout=300, verify=NO_TLS).text

    eventually(lambda: fetched in scraped())  # with the next heartbeat
    text = scraped()
    for name in ("tidemill:", "vllm:"):
        assert f'{name}request_success_total{{finished_reason="length",model_name="keeper"}}' in text
        assert f'{name}request_queue_time_seconds_count{{model_name="keeper"}}' in text


def calls_of(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    """Generate and GenerateStream."""
    service = "/tidemill.v1.Generation"
    anything: Any = channel
    return (
        anything.unary_unary(
            f"{service}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        ),
        anything.unary_stream(
            f"{service}/GenerateStream",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateChunk.FromString,
        ),
    )


async def test_grpc_and_http_give_the_same_greedy_tokens(edge: Edge) -> None:
    prompts = ["Where is Emma?", STORY]
    sampling = pb.Sampling(temperature=0, max_tokens=24, ignore_eos=True)

    async with grpc.aio.insecure_channel(edge.grpc_address) as channel:
        generate, stream = calls_of(channel)
        for prompt in prompts:
            expected = over_http(edge, {}, **completion(prompt, 24))
            request = pb.GenerateRequest(text=prompt, sampling=sampling)
            whole = await generate(request)
            chunks = [chunk async for chunk in stream(request)]
            (choice,) = whole.choices
            assert choice.text == expected["choices"][0]["text"]
            assert "".join(chunk.choice.text for chunk in chunks) == choice.text
            ids = [token for chunk in chunks for token in chunk.choice.token_ids]
            assert ids == list(choice.token_ids)
            assert len(ids) == 24
            assert whole.usage.prompt_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("who", ["plain", "another authority"])
async def test_stranger_cannot_reach_a_worker(edge: Edge, who: str, tmp_path: Path) -> None:
    theirs = None if who == "plain" else issue(tmp_path / "theirs", trustme.CA())
    row = edge.server.workers("decode")[0]["info"]
    hello = encode_client_frame(Hello(WorkerId(row["worker"])))

    async def answer(tls: MutualTls | None) -> Any:  # noqa: ANN401 - a frame, or the end of the stream
        async with open_channel(row["address"], tls) as channel, asyncio.timeout(EVENTUALLY_S_MAX):
            anything: Any = channel
            call = anything.stream_stream("/tidemill.Worker/Stream")()
            await call.write(hello)
            await call.done_writing()
            return await call.read()

    assert not isinstance(await answer(edge.tls), bytes), "the stream ends as it should"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(theirs)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_every_process_listens_on_loopback_only(edge: Edge) -> None:
    listening = listening_of(edge.server.processes())
    assert len(listening) >= 5, "HTTP, gRPC, a router and two workers at least"
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


async def test_prompts_and_keys_are_in_no_log(edge: Edge) -> None:
    key, words = "sk-zyxomma-petiolatum", "Who is Ophiogomphus?"
    bearer = f"Bearer {key}"
    for max_tokens in (4, -1):
        post(edge, {"authorization": bearer}, prompt=words, max_tokens=max_tokens)
    async with grpc.aio.insecure_channel(edge.grpc_address) as channel:
        generate, _ = calls_of(channel)
        request = pb.GenerateRequest(text=words, sampling=pb.Sampling(max_tokens=4, ignore_eos=True))
        reply = await generate(request, metadata=(("authorization", bearer),))
        assert reply.usage.completion_tokens == 4
    log = edge.server.log()
    assert "gRPC on" in log
    assert "Ophiogomphus" not in log
    assert "zyxomma" not in log
