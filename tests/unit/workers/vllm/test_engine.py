"""The engine over a server that speaks as vLLM does: streams, cancellation, draining, what it reports."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.support.waits import until
from tests.support.workers.vllm_server import HANDOFF, REFUSAL, VllmServer, frame_of, serving
from tidemill.kvstore.periodic import FAILED_ROUNDS
from tidemill.workers.inbox import Pause
from tidemill.workers.messages import (
    Delta,
    EngineInfo,
    Grammar,
    HandedOver,
    Request,
    RequestError,
    Sampling,
    WorkerGone,
)
from tidemill.workers.vllm import engine as engine_module
from tidemill.workers.vllm.client import VllmClient
from tidemill.workers.vllm.engine import VllmEngine
from tidemill.workers.vllm.events import Subscription
from tidemill.workers.vllm.metrics import Metrics
from tidemill.workers.vllm.prefixes import BlockStored, EventBatch, Prefixes
from tidemill.workers.vllm.server_process import EngineEnded

INFO = EngineInfo(
    inexact_with=("grammar",),
    refuses=("prompt_logprobs",),
    fingerprint="m",
    layout="v",
    page_tokens=4,
    page_bytes=64,
    vocab_size=100,
    memory_bytes=4096,
)
GREEDY = Request(
    request_id="r", tokens=tuple(range(10)), max_new_tokens=3, sampling=Sampling(temperature=0.0)
)
GUIDED = replace(GREEDY, sampling=Sampling(temperature=0.0, grammar=Grammar(kind="json_object")))


async def engine_of(
    server: VllmServer,
    prefixes: Prefixes | None = None,
    events: Subscription | None = None,
    *,
    outlives: bool = False,
) -> VllmEngine:
    """Return an engine, which the test closes if it outlives the server."""
    client = VllmClient(server.url)
    if not outlives:
        server.at_end.push_async_callback(client.close)
    prefixes = Prefixes("m", "v", 4, keeps_states=False) if prefixes is None else prefixes
    first = await client.metrics()
    return VllmEngine(client, INFO, first, prefixes, events, prioritizes=True, wedged_s_max=0.3)


class Streamed:
    """A stream that runs, with its deltas."""

    def __init__(self, engine: VllmEngine, request: Request) -> None:
        self.deltas: list[Delta] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(engine.stream(request, self._take))

    def _take(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.begun.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]


WHOLE = [frame_of(11), frame_of(12, 13, finish="length")]
HANGING = [frame_of(11), None]


async def test_stream_has_the_tokens_and_the_source_of_the_prompt() -> None:
    async with serving(VllmServer(list(WHOLE), list(WHOLE))) as server:
        prefixes = Prefixes("m", "v", 4, keeps_states=False)
        engine = await engine_of(server, prefixes)
        block = BlockStored([1, 2], None, list(GREEDY.tokens[:8]), 4)
        for reused in (0, 8):
            streamed = Streamed(engine, GREEDY)
            await streamed.task
            assert streamed.tokens == [11, 12, 13]
            assert [delta.finish for delta in streamed.deltas] == [None, "length"]
            first, *others = [delta.provenance for delta in streamed.deltas]
            assert first is not None
            assert others == [None]
            assert (first.reused_tokens, first.computed_tokens) == (reused, 10 - reused)
            prefixes.apply(EventBatch(0.0, [block]))
        assert server.bodies[0]["token_ids"] == list(GREEDY.tokens)


async def test_cancelled_stream_closes_its_connection() -> None:
    async with serving(VllmServer(list(HANGING))) as server:
        streamed = Streamed(await engine_of(server), GREEDY)
        await streamed.begun.wait()
        streamed.task.cancel()
        with suppress(asyncio.CancelledError):
            await streamed.task
        await asyncio.wait_for(server.closed.wait(), 5)


async def test_reader_that_pauses_holds_the_stream_and_is_no_sign_of_a_wedged_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "LOOK_S", 0.02)
    async with serving(VllmServer(list(WHOLE))) as server:
        engine, may_go_on, seen = await engine_of(server), asyncio.Event(), list[Delta]()

        def take(delta: Delta) -> Pause:
            seen.append(delta)
            return may_go_on.wait

        running = asyncio.create_task(engine.run())
        task = asyncio.create_task(engine.stream(GREEDY, take))
        await asyncio.sleep(0.6)
        assert len(seen) == 1
        assert not running.done()
        may_go_on.set()
        await task
        assert len(seen) == 2
        running.cancel()


@pytest.mark.parametrize("begun", [True, False])
async def test_draining_hands_over_what_others_can_continue(begun: bool) -> None:  # noqa: FBT001
    frames: list[bytes | None] = list(HANGING) if begun else [None]
    async with serving(VllmServer(list(frames), list(frames))) as server:
        engine = await engine_of(server)
        greedy, guided = Streamed(engine, GREEDY), Streamed(engine, GUIDED)
        await until(lambda: len(server.bodies) == 2)
        await until(lambda: len(greedy.deltas) + len(guided.deltas) == 2 * begun)
        engine.restrict(produces=False, generates=False)
        with pytest.raises(HandedOver):
            await greedy.task
        with pytest.raises(HandedOver):
            await engine.stream(GREEDY, lambda _: None)
        if begun:
            assert not guided.task.done()
            guided.task.cancel()
        else:
            with pytest.raises(HandedOver):
                await guided.task


async def test_lost_server_and_refusals() -> None:
    broken: list[bytes | None] = [frame_of(11)]
    async with serving(VllmServer(broken, [json.dumps(REFUSAL).encode()])) as server:
        engine = await engine_of(server, outlives=True)
        streamed = Streamed(engine, GREEDY)
        with pytest.raises(WorkerGone):
            await streamed.task
        assert streamed.tokens == [11]
        with pytest.raises(RequestError, match="vLLM refuses it: temperature"):
            await Streamed(engine, GREEDY).task
        for refused in (
            replace(GREEDY, tokens=(100,)),
            replace(GREEDY, sampling=Sampling(prompt_logprobs=1)),
        ):
            with pytest.raises(RequestError):
                await Streamed(engine, refused).task
        assert len(server.bodies) == 2
    with pytest.raises(WorkerGone, match="does not answer"):
        await Streamed(engine, GREEDY).task
    await engine.close()


async def test_prompt_ends_with_the_engine() -> None:
    """Its worker may still report until the process ends."""
    async with serving(VllmServer([None])) as server:
        engine = await engine_of(server, events=Subscription(), outlives=True)
        prompt = asyncio.create_task(engine.produce(GREEDY))
        await until(lambda: len(server.bodies) == 1)
        await engine.close()
        with pytest.raises(WorkerGone):
            await prompt
        assert not engine.take_announcement(full=False).added


async def test_prompt_is_computed_for_another_server_which_pulls_it() -> None:
    async with serving(VllmServer()) as server:
        engine = await engine_of(server)
        produced = await engine.produce(GREEDY)
        assert (produced.depth, produced.provenance.computed_tokens) == (8, 10)
        assert json.loads(produced.handoff or b"") == HANDOFF
        pulling = Streamed(engine, replace(GREEDY, handoff=produced.handoff))
        await until(lambda: len(server.bodies) == 2)
        assert engine.load().queued_tokens == 0
        await pulling.task
        first = pulling.deltas[0].provenance
        assert first is not None
        assert (first.reused_tokens, first.fetched_tokens, first.computed_tokens) == (0, 10, 0)
        prompt, rest = server.bodies
        assert (prompt["stream"], prompt["sampling_params"]["max_tokens"]) == (False, 1)
        assert prompt["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert (rest["kv_transfer_params"], rest["sampling_params"]["max_tokens"]) == (HANDOFF, 3)


async def test_prompt_for_another_server_fails_as_a_stream_does() -> None:
    nothing = b'{"choices": [], "kv_transfer_params": null}'
    answers: list[list[bytes | None]] = [[nothing], [json.dumps(REFUSAL).encode()], [None], [None]]
    async with serving(VllmServer(*answers)) as server:
        engine = await engine_of(server, outlives=True)
        assert (await engine.produce(GREEDY)).handoff is None
        with pytest.raises(RequestError, match="vLLM refuses it: temperature"):
            await engine.produce(GREEDY)
        cancelled = asyncio.create_task(engine.produce(GREEDY))
        await until(lambda: len(server.bodies) == 3)
        cancelled.cancel()
        await asyncio.wait_for(server.closed.wait(), 5)
        drained = asyncio.create_task(engine.produce(GREEDY))
        await until(lambda: len(server.bodies) == 4)
        engine.restrict(produces=True, generates=False)
        await asyncio.sleep(0.05)
        assert not drained.done(), "its role takes prompts"
        engine.restrict(produces=False, generates=True)
        for refused in (drained, engine.produce(GREEDY)):
            with pytest.raises(HandedOver):
                await refused
    engine.restrict(produces=True, generates=True)
    with pytest.raises(WorkerGone, match="does not answer"):
        await engine.produce(GREEDY)
    await engine.close()


async def test_server_that_leaves_waits_until_its_blocks_are_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(VllmServer()) as server:
        engine = await engine_of(server)
        leaving = asyncio.create_task(engine.drain_publications())
        await asyncio.sleep(0.2)
        assert not leaving.done()
        server.usage = 0.0
        await asyncio.wait_for(leaving, 5)
        server.usage = 0.25
        monkeypatch.setattr(engine_module, "PULLED_S_MAX", 0.1)
        await asyncio.wait_for(engine.drain_publications(), 5)
        await engine.close()


async def test_load_counts_prompts_until_their_first_token() -> None:
    async with serving(VllmServer([None], list(HANGING))) as server:
        engine = await engine_of(server)
        waiting = Streamed(engine, GREEDY)
        await until(lambda: len(server.bodies) == 1)
        streaming = Streamed(engine, GREEDY)
        await streaming.begun.wait()
        load = engine.load()
        assert (load.queued_tokens, load.queued_s, load.streams, load.running_rows) == (10, 0.0, 1, 2)
        assert (load.budget_bytes, sum(load.memory.values())) == (4096, 4096)
        assert load.live_bytes == 1024
        assert load.counters["generated_tokens"] == 7
        assert load.counters["failed_rounds"] == FAILED_ROUNDS.total()
        for stream in (waiting, streaming):
            stream.task.cancel()


async def test_prompt_that_runs_is_computed_once_for_all_that_begin_with_it() -> None:
    async with serving(VllmServer([None], [None], [None])) as server:
        engine = await engine_of(server)
        streams = [Streamed(engine, GREEDY), Streamed(engine, replace(GREEDY, salt="other"))]
        await until(lambda: len(server.bodies) == 2)
        assert engine.load().queued_tokens == 10 + 10
        streams.append(Streamed(engine, GREEDY))
        await until(lambda: len(server.bodies) == 3)
        assert engine.load().queued_tokens == 10 + 10 + 2
        for stream in streams:
            stream.task.cancel()


@pytest.mark.parametrize("produces", [True, False])
async def test_speed_of_the_server_is_known_after_some_prompts(produces: bool) -> None:  # noqa: FBT001
    async with serving(VllmServer()) as server:
        engine = await engine_of(server)
        assert not engine.load().speed.token_s
        async with asyncio.timeout(20):
            while not engine.load().speed.token_s:
                await (engine.produce(GREEDY) if produces else Streamed(engine, GREEDY).task)


async def test_server_that_steps_no_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, and a request has no token."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.02)
    async with serving(VllmServer([None])) as server:
        engine = await engine_of(server)
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(0.6)
        assert not running.done(), "a server without requests steps not"
        progress = engine.progress
        streamed = Streamed(engine, GREEDY)
        with pytest.raises(BaseExceptionGroup) as failed:
            await asyncio.wait_for(running, 10)
        assert failed.group_contains(EngineEnded, match="has made no step")
        assert engine.progress > progress
        streamed.task.cancel()


@pytest.mark.parametrize("silent_s_max", [0.0, 0.2])
async def test_server_that_answers_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, silent_s_max: float
) -> None:
    """Not at the first look without an answer, however long that took."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.02)
    monkeypatch.setattr(engine_module, "SILENT_S_MAX", silent_s_max)
    async with serving(VllmServer()) as server:
        engine = await engine_of(server, outlives=True)
    looks = 0

    async def metrics() -> Metrics:
        nonlocal looks
        looks += 1
        raise WorkerGone("it does not answer")

    monkeypatch.setattr(VllmClient, "metrics", lambda _: metrics())
    with pytest.raises(BaseExceptionGroup) as failed:
        await asyncio.wait_for(engine.run(), 10)
    assert failed.group_contains(EngineEnded, match="does not answer")
    assert looks >= engine_module.SILENT_LOOKS


async def test_server_that_reports_its_end_is_given_up() -> None:
    async with serving(VllmServer([frame_of(100)])) as server:
        engine = await engine_of(server)
        running = asyncio.create_task(engine.run())
        server.health = 503
        with pytest.raises(WorkerGone):
            await engine.stream(GREEDY, lambda _: None)
        with pytest.raises(BaseExceptionGroup) as failed:
            await asyncio.wait_for(running, 10)
        assert failed.group_contains(EngineEnded, match="has ended")


def test_metrics_sum_over_engines_and_name_the_facts() -> None:
    text = b"""# HELP x
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 2.0
vllm:cache_config_info{block_size="16",mamba_cache_mode="align",num_gpu_blocks="8"} 1.0
other:x 3
"""
    metrics = Metrics.parse(text)
    assert metrics.values["num_requests_running"] == 3
    assert (metrics.page_tokens, metrics.memory_bytes, metrics.keeps_states) == (16, 128, True)
    assert metrics.fetch_bytes_per_s == 0.0


def test_pulls_are_counted() -> None:
    text = b"""vllm:cache_config_info{block_size="16"} 1.0
vllm:request_prefill_kv_computed_tokens_sum 1000
vllm:nixl_bytes_transferred_sum 600
vllm:nixl_xfer_time_seconds_sum 3
vllm:nixl_num_failed_transfers_total 4
"""
    metrics = Metrics.parse(text)
    assert metrics.fetch_bytes_per_s == 200
    assert metrics.counters() == {
        "computed_tokens": 1000,
        "fetched_bytes": 600,
        "fetch_seconds": 3,
        "fetches_failed": 4,
    }
