"""`tidemill bench` over HTTP: figures, goodput, errors and refusals; its workloads are seeded."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import MODEL, TRACE, FakeService, app_over, serving
from tests.unit.cluster.simulate.test_trace import line
from tidemill.cluster.bench.client import COMPLETIONS, LoadClient, RequestResult, messages_of
from tidemill.cluster.bench.command import bench, measure, open_http
from tidemill.cluster.bench.files import BadWorkload, ShareGptFile, TraceFile, sharegpt, trace
from tidemill.cluster.bench.load import arrivals_s, run_load, timed
from tidemill.cluster.bench.report import BenchRun, figures_of, is_good
from tidemill.cluster.bench.workloads import (
    AgentsShape,
    GspShape,
    Item,
    MultiTurnShape,
    RandomShape,
    Shape,
    Workload,
    generated,
    gsp,
    multi_turn,
    random_prompts,
)
from tidemill.cluster.cli.bench import bench_options_of
from tidemill.cluster.cli.main import EXIT_REFUSED, main, parser

CHUNK = 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
END = 'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def item(position: int = 0) -> Item:
    return Item(
        tokens=(20,) * 1100, max_tokens=4, group=0, position=position, shared_tokens=1024 * bool(position)
    )


def result(position: int, ttft_s: float, cached: int, *, gap_s: float = 0.01) -> RequestResult:
    gaps_s = (gap_s, 3 * gap_s)
    return RequestResult(
        item=item(position),
        start_s=float(position),
        ttft_s=ttft_s,
        gaps_s=gaps_s,
        e2e_s=ttft_s + sum(gaps_s),
        prompt_tokens=1100,
        output_tokens=3,
        details={"cached_tokens": cached, "prefilled_tokens": 1100 - cached, "replayed_tokens": 0,
                 "fetched_tokens": 0, "reused_tokens": cached},
    )  # fmt: skip


RUN = BenchRun(
    results=(
        result(0, 1.0, 0),
        result(1, 0.9, 0),
        result(2, 0.2, 1024),
        result(3, 0.3, 960, gap_s=0.02),
        RequestResult(item=item(4), start_s=4.0, error="HTTP 429: wait"),
    ),
    wall_s=2.0,
    goodput_ms={"ttft": 950, "itl": 40},
)


def test_figures_of_a_known_run() -> None:
    figures = figures_of(RUN)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (4, 1, {"HTTP 429: wait": 1})
    assert (figures["request_throughput"], figures["output_throughput"]) == (2, 6)
    assert figures["total_token_throughput"] == (4400 + 12) / 2
    assert figures["mean_ttft_ms"] == pytest.approx(600)
    assert figures["median_ttft_ms"] == pytest.approx(600)
    assert figures["p90_ttft_ms"] == pytest.approx(1000 * np.percentile([1.0, 0.9, 0.2, 0.3], 90))
    assert figures["p99_itl_ms"] == pytest.approx(1000 * np.percentile([0.01, 0.03] * 3 + [0.02, 0.06], 99))
    assert figures["mean_tpot_ms"] == pytest.approx((3 * 20 + 40) / 4)
    assert figures["cached_token_ratio"] == pytest.approx((1024 + 960) / 4400)
    assert figures["cached_to_shared"] == pytest.approx((1024 + 960) / (3 * 1024))
    assert figures["tokens_per_request"]["prefilled"] == (1100 + 1100 + 76 + 140) / 4
    places = figures["by_position"]
    assert places["second"]["shared_tokens_computed_mean"] == 1024
    assert places["rest"]["shared_tokens_computed_max"] == 64
    assert [places[name]["ttft_to_first"] for name in places] == pytest.approx([1.0, 0.9, 0.25])
    assert figures["request_goodput"] == 1.0  # the second and the third
    json.dumps(figures)


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        ({}, [True] * 4 + [False]),
        ({"ttft": 900}, [False, True, True, True, False]),
        ({"itl": 59}, [True, True, True, False, False]),
        ({"tpot": 20.001}, [True, True, True, False, False]),
        ({"e2el": 300}, [False, False, True, False, False]),
        ({"ttft": 900, "e2el": 400}, [False, False, True, True, False]),
    ],
)
def test_goodput_counts_requests_that_met_every_target(targets: dict[str, float], good: list[bool]) -> None:
    assert [is_good(answered, targets) for answered in RUN.results] == good


def bench_command(url: str, *words: str) -> int:
    return main(["bench", "--base-url", url, "--disable-tqdm", *words])


async def measured(url: str, *words: str) -> BenchRun:
    options = parser().parse_args(["bench", "--base-url", url, *words])
    times = count()
    return await measure(bench_options_of(options, {}), lambda: float(next(times)))


async def ours(*words: str) -> tuple[BenchRun, FakeService]:
    """Return a run against our own edge with a scripted engine."""
    service = FakeService(lambda _: [5] * 100, model=replace(MODEL, max_model_len=4096))
    async with serving(app_over(service)) as url:
        return await measured(f"{url}/v1", *words), service


async def test_conversations_over_http() -> None:
    words = ("--dataset-name", "multi-turn", "--max-concurrency", "3", "--ignore-eos", "--temperature", "0")
    run, service = await ours(*words)
    items = generated(Random(0), MODEL.vocab_size, MultiTurnShape()).items
    assert [answered.item for answered in run.results] == list(items)
    for answered in run.results:
        assert not answered.error
        assert answered.prompt_tokens == len(answered.item.tokens)
        assert answered.output_tokens == answered.item.max_tokens == len(answered.gaps_s) + 1
        assert answered.details["cached_tokens"] == TRACE.cached_tokens(answered.prompt_tokens)
    sent = [request.tokens for request in service.requests]
    for asked in items:
        if asked.after is not None:
            assert sent.index(items[asked.after].tokens) < sent.index(asked.tokens)
    assert {request.sampling.temperature for request in service.requests} == {0}


async def test_chat_over_http_without_its_warmups() -> None:
    words = ("--num-prompts", "3", "--num-warmups", "2", "--input-len", "9", "--output-len", "7")
    run, service = await ours("--backend", "openai-chat", *words)
    assert [answered.error for answered in run.results] == [""] * 3
    assert {answered.output_tokens for answered in run.results} == {7}
    assert all(answered.ttft_s < answered.e2e_s for answered in run.results)
    assert len(service.requests) == 5


@pytest.mark.parametrize("hinted", [True, False])
async def test_hints_of_agents_are_sent_on_demand(hinted: bool) -> None:  # noqa: FBT001  a parameter
    shape = ("--agents-num-sessions", "1", "--agents-num-turns", "1", "--agents-num-strangers", "0")
    words = ("--dataset-name", "agents", *shape, "--agents-system-prompt-len", "256")
    _, service = await ours(*words, *(["--hints"] if hinted else []))
    assert [request.breakpoints for request in service.requests] == [(256,) if hinted else ()] * 2
    assert len({request.session for request in service.requests}) == (2 if hinted else 1)


@asynccontextmanager
async def stub(answer: Answer) -> AsyncGenerator[str]:
    """Serve `answer` on every connection, of any kind of server."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def scripted(*answers: str, heads: list[bytes] | None = None) -> Answer:
    """Answer the requests in turn: the text as it is, then the connection ends. The last text repeats."""
    numbers = count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head)
        length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
        text = answers[min(next(numbers), len(answers) - 1)]
        status = "" if text.startswith("HTTP/") else "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
        writer.write(f"{status}{text}".encode())
        await writer.drain()
        writer.close()

    return answer


ANY = ("--model", "any", "--vocab-size", "99", "--max-concurrency", "1")
BROKEN = {
    "HTTP 503": "HTTP/1.1 503 Busy\r\nconnection: close\r\n\r\nno workers",
    "the stream ended before its answer": CHUNK,
    "peer closed connection": f"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{CHUNK}",
    "the stream failed": 'data: {"error": {"message": "a worker is lost"}}\n\n',
    "not JSON in the stream": "data: {\n\n",
    "the stream had no tokens": "data: [DONE]\n\n",
    "Server disconnected": "HTTP/",
}


@pytest.mark.parametrize("error", BROKEN)
async def test_requests_that_fail_are_counted_and_the_others_measured(error: str) -> None:
    heads: list[bytes] = []
    answers = scripted(CHUNK + END, BROKEN[error], CHUNK + END, heads=heads)
    async with stub(answers) as url:
        results = (await measured(url, *ANY, "--num-prompts", "3", "--api-key", "k")).results
    assert b"authorization: bearer k\r\n" in heads[0].lower()
    assert [bool(answered.error) for answered in results] == [False, True, False]
    assert error in results[1].error
    figures = figures_of(BenchRun(results=results, wall_s=1.0))
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 1, 4)


async def test_token_without_text_has_the_time_of_the_last_chunk() -> None:
    """The first bytes of a character alone make no text."""
    end = 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": %d}}\n\n'
    async with stub(scripted(end + usage % 1, end + usage % (0,))) as url:
        one, none = (await measured(url, *ANY, "--num-prompts", "2")).results
    assert (one.error, one.output_tokens, one.ttft_s) == ("", 1, one.e2e_s)
    assert one.ttft_s > 0
    assert none.error == "the stream had no tokens"


def test_server_that_dies_midway(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of the requests fail, the first ones are reported, and the command returns 1."""
    answered = Counter[str]()

    async def run() -> tuple[str, list[RequestResult]]:
        server = await asyncio.start_server(scripted(CHUNK + END), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        def count_answer(done: RequestResult) -> None:
            answered["failed" if done.error else "whole"] += 1
            if answered["whole"] == 3:
                server.close()

        async with open_http(url) as http:
            client = LoadClient(http=http, clock_s=asyncio.get_running_loop().time, model="any")
            return url, await run_load(client, Workload("w", (item(),) * 8), 1, count_answer)

    url, results = asyncio.run(run())
    assert answered == {"whole": 3, "failed": 5}
    assert all("connect" in failed.error.lower() for failed in results if failed.error)
    assert bench_command(url, "--model", "any", "--num-prompts", "2", "--json") == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 2


async def test_open_loop_does_not_wait_for_answers_and_turns_do() -> None:
    """Requests are sent at their times though none is answered; with a bound, and as turns, they wait."""
    turns = (item(), *(replace(item(turn), after=turn - 1) for turn in (1, 2)))
    for items, concurrency, most_open in (((item(),) * 6, None, 6), ((item(),) * 6, 2, 2), (turns, None, 1)):
        most = open_now = 0

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal most, open_now
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(0.3)
            open_now -= 1
            await scripted(CHUNK + END)(reader, writer)

        async with stub(slow) as url, open_http(url) as http:
            client = LoadClient(http=http, clock_s=asyncio.get_running_loop().time, model="any")
            workload = timed(Workload("w", items), Random(0), rate=60.0)
            results = await run_load(client, workload, concurrency)
        assert not [failed.error for failed in results if failed.error]
        assert most == most_open


async def test_command_prints_writes_and_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async with stub(scripted(CHUNK + END)) as url:
        words = ("--model", "any", "--num-prompts", "4", "--goodput", "ttft:60000", "itl:60000")
        files = ("--result-filename", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png"))
        options = parser().parse_args(["bench", "--base-url", url, *words, *files])
        assert await asyncio.to_thread(bench, bench_options_of(options, {}), time.perf_counter) == 0
    printed = capsys.readouterr().out
    assert "4 requests answered" in printed
    assert "requests per second within ttft 60000 ms, itl 60000 ms" in printed
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["request_goodput"] == written["request_throughput"] > 0
    assert len(written["requests"]) == 4
    assert written["requests"][0]["output_tokens"] == 2
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


REFUSED = {
    "--num-prompts 0": "set it above 0",
    "--max-concurrency -1": "set it above 0",
    "--request-rate 0": "set it above 0",
    "--burstiness nan": "set it above 0",
    "--num-warmups -1": "set it to 0 or more",
    "--vocab-size 16": "set it above 16",
    "--goodput ttft": "write it like ttft:500",
    "--goodput tftt:500": "write it like ttft:500",
    "--goodput itl:-1": "write it like ttft:500",
    "--metric-percentiles 50,101": "write them like 50,90,99.9",
    "--extra-body [1]": "give a JSON object",
    "--extra-body {": "give a JSON object",
    "--dataset-name sharegpt": "give --dataset-path",
    "--dataset-name trace --dataset-path /nowhere/trace.jsonl": "cannot be read",
    "--dataset-path /nowhere": "give --dataset-path",
    "--dataset-name gsp --gsp-num-groups 0": "--gsp-num-groups 0: set it to 1 or more",
    "--random-range-ratio 1.5": "set it to 1 or less",
    "--backend openai-chat --hints": "use them with --backend openai",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_arguments_are_refused_in_a_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9"
    assert bench_command(url, "--model", "any", *words.split()) == EXIT_REFUSED
    error = capsys.readouterr().err
    assert REFUSED[words] in error
    assert error.count("\n") == 1


def test_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_command("http://127.0.0.1:9") == EXIT_REFUSED
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err


SMALL: dict[str, Shape] = {
    "random": RandomShape(num_prompts=9, input_len=20, range_ratio=0.5),
    "prefix": RandomShape(num_prompts=9, input_len=20, prefix_len=7),
    "gsp": GspShape(num_groups=4, prompts_per_group=3, system_prompt_len=50, range_ratio=0.2),
    "multi-turn": MultiTurnShape(),
    "agents": AgentsShape(num_turns=3, system_prompt_len=100),
}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(SMALL)))
def test_workloads_are_seeded_and_share_their_prefixes(seed: int, name: str) -> None:
    workload = generated(Random(seed), 896, SMALL[name])
    assert workload == generated(Random(seed), 896, SMALL[name])
    assert workload != generated(Random(seed + 1), 896, SMALL[name])
    for index, item in enumerate(workload.items):
        assert item.after is None or item.after < index
        assert min(item.tokens) >= 0
        assert max(item.tokens) < 896
        earlier = [other for other in workload.items[:index] if other.group == item.group]
        assert item.position == len(earlier)
        if item.position:
            assert 0 < item.shared_tokens < len(item.tokens)
            shared = item.tokens[: item.shared_tokens]
            assert any(other.tokens[: item.shared_tokens] == shared for other in earlier)


def test_lengths_of_random_prompts_are_those_of_vllm() -> None:
    shape = RandomShape(num_prompts=2000, input_len=100, output_len=10, range_ratio=0.3, prefix_len=5)
    items = random_prompts(Random(0), 896, shape).items
    lengths = [len(item.tokens) - 5 for item in items]
    assert (min(lengths), max(lengths)) == (70, 130)
    assert {item.max_tokens for item in items} == set(range(7, 14))
    assert mean(lengths) == pytest.approx(100, rel=0.02)
    assert {item.tokens[:5] for item in items} == {items[0].tokens[:5]}


def test_groups_are_those_of_sglang() -> None:
    shape = GspShape(num_groups=5, prompts_per_group=4, system_prompt_len=30, question_len=7, output_len=3)
    shuffled = gsp(Random(0), 896, shape).items
    assert {(len(item.tokens), item.max_tokens) for item in shuffled} == {(37, 3)}
    assert len({item.tokens[:30] for item in shuffled}) == 5
    assert [item.group for item in shuffled] != sorted(item.group for item in shuffled)
    ordered = gsp(Random(0), 896, replace(shape, ordered=True)).items
    assert [item.group for item in ordered] == sorted(item.group for item in ordered)


def test_chat_has_the_turns_as_messages() -> None:
    items = multi_turn(Random(0), 896, MultiTurnShape(num_conversations=1, num_turns=3)).items
    chats = [messages_of(item) for item in items]
    roles = ["user", "assistant"] * 3
    assert [[message["role"] for message in chat] for chat in chats] == [roles[:1], roles[:3], roles[:5]]
    for earlier, later in pairwise(chats):
        assert later[: len(earlier)] == earlier
    for item, chat in zip(items, chats, strict=True):
        assert sum(len(message["content"].split()) for message in chat) == len(item.tokens)


def test_body_has_the_fields_of_its_endpoint() -> None:
    hints = {"session_id": "a"}
    item = Item(tokens=(20, 21), max_tokens=3, group=0, position=0, shared_tokens=0, hints=hints)
    plain = LoadClient(http=open_http("http://x"), clock_s=lambda: 0.0, model="m", fields={"top_p": 0.5})
    assert plain.endpoint == COMPLETIONS
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    common = {"top_p": 0.5, "model": "m", "max_tokens": 3, **stream}
    assert replace(plain, hints=True).body(item) == {**common, **hints, "prompt": (20, 21)}
    chat = replace(plain, endpoint="/openai/v1/chat/completions").body(item)
    assert chat == {**common, "messages": [{"role": "user", "content": "case week"}]}


def test_sharegpt_file(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"

    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "any", "value": text} for text in texts]}

    talks = [talk(f"question {number}", "word " * number) for number in range(1, 40)]
    path.write_text(json.dumps([talk("alone"), "junk", *talks]))
    workload = sharegpt(ShareGptFile(path=path, num_prompts=20), Random(1))
    assert workload == sharegpt(ShareGptFile(path=path, num_prompts=20), Random(1))
    assert len(workload.items) == 20
    for item in workload.items:
        number = int(item.text.removeprefix("question "))
        assert item.max_tokens == max(4, number * 5 // 4)
        assert messages_of(item) == [{"role": "user", "content": item.text}]
    fixed = sharegpt(ShareGptFile(path=path, num_prompts=20, output_len=9), Random(1))
    assert {item.max_tokens for item in fixed.items} == {9}
    for content in ("{", "{}", "[]", '[{"conversations": [{"value": 1}, {"value": 2}]}]'):
        path.write_text(content)
        with pytest.raises(BadWorkload, match=r"conversations\.json"):
            sharegpt(ShareGptFile(path=path, num_prompts=1), Random(0))


def test_trace_shares_the_blocks_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(1000, 1100, [1, 2, 3]), (1500, 1100, [1, 2, 4]), (4000, 600, [9, 8]), (5000, 700, [1])]
    path.write_text("\n".join(line(at, prompt, 5, blocks) for at, prompt, blocks in rows))
    workload = trace(TraceFile(path=path, num_prompts=10), 896, 3)
    assert workload == trace(TraceFile(path=path, num_prompts=10), 896, 3)
    first, second, third, fourth = workload.items
    assert [len(item.tokens) for item in workload.items] == [1100, 1100, 600, 700]
    assert first.tokens[:1024] == second.tokens[:1024]
    assert first.tokens[1024:] != second.tokens[1024:]
    assert third.tokens[:512] != first.tokens[:512] == fourth.tokens[:512]
    assert fourth.tokens[512:] != first.tokens[512:700]
    assert [item.shared_tokens for item in workload.items] == [0, 1024, 0, 512]
    assert [item.position for item in workload.items] == [0, 1, 0, 2]
    own = timed(workload, Random(0), self_timed=True)
    assert [item.at_s for item in own.items] == [0.0, 0.5, 3.0, 4.0]
    faster = timed(workload, Random(0), rate=10, self_timed=True)
    assert [item.at_s for item in faster.items] == pytest.approx([0.0, 0.05, 0.3, 0.4])
    assert len(trace(TraceFile(path=path, num_prompts=2), 896, 3).items) == 2


@given(
    seed=st.integers(0, 99),
    count=st.integers(1, 50),
    rate=st.floats(0.1, 1000),
    burstiness=st.floats(0.05, 50) | st.just(inf),
)
def test_arrivals_ascend_and_keep_their_rate(seed: int, count: int, rate: float, burstiness: float) -> None:
    times_s = arrivals_s(count, rate, burstiness, Random(seed))
    assert times_s == arrivals_s(count, rate, burstiness, Random(seed))
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert times_s[-1] == pytest.approx(count / rate)


def test_burstiness_is_the_shape_of_a_gamma_distribution() -> None:
    for burstiness, variation in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (inf, 0.0)):
        times_s = arrivals_s(20_000, 5.0, burstiness, Random(0))
        gaps_s = [after - before for before, after in pairwise(times_s)]
        assert pstdev(gaps_s) / mean(gaps_s) == pytest.approx(variation, rel=0.05, abs=1e-6)
    assert arrivals_s(3, inf, 1.0, Random(0)) == [0.0] * 3
