"""A small model on groups of real processes: the tokens of one process, and an end that leaves nothing."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import isclose
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import trustme

from tests.support.parity.heads import folder_with_head
from tests.support.parity.served import answer
from tests.support.workers.ranks import RANKS, end, network_of, rank_of_a_model, started
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.workers.engine.build import BuiltEngine, build_engine
from tidemill.workers.execution import model_runner as runner
from tidemill.workers.execution.model_runner import Outputs, TorchRunner
from tidemill.workers.execution.step import Drawn, Step
from tidemill.workers.messages import (
    Request,
    RequestError,
    Sampling,
    TokenLogprob,
    WorkerGone,
)
from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.link import Ended, StartRanks
from tidemill.workers.parallel.network import Meeting
from tidemill.workers.settings import EngineSettings

P = 16
VOCABULARY = 97
SIX_HEADS = {
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 0,
} | {
    f"linear_{name}": value
    for name, value in {
        "num_key_heads": 6,
        "num_value_heads": 6,
        "key_head_dim": 8,
        "value_head_dim": 8,
    }.items()
}
"""Divides among 2 and 3 ranks; the one KV head is there on each of them."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> EngineSettings:
    """The model has a prediction head, which is often right; it is loaded where there are guesses."""
    folder = tmp_path_factory.mktemp("models") / "model"
    return EngineSettings(
        model_folder=folder_with_head(folder, agrees=True, **SIX_HEADS),
        memory_bytes=24 << 20,
        store_url="memory:?size=0",
        cache_folder=kernel_cache,
        page_size=P,
        tensor_parallel_sizes=(1, 2, 3),
        max_num_batched_tokens=64,
    )


over_nodes: MutualTls | None = None
"""The certificates of ranks that have a node each; None: they are on one."""


@pytest.fixture(
    params=[
        ("exact", None, False),
        pytest.param(("fast", "gloo", False), marks=pytest.mark.slow),
        ("fast", None, True),
    ],
    ids=str,
)
def settings(
    alone: EngineSettings,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> EngineSettings:
    """Return settings with an empty store that processes share. No token here depends on the way to sum."""
    if request.param[2]:
        tls = issue(tmp_path / "tls", trustme.CA())
        monkeypatch.setattr(sys.modules[__name__], "over_nodes", tls)
    return replace(
        alone,
        store_url=f"file://{tmp_path}?size=64MiB",
        tensor_parallel_reduce=request.param[0],
        tensor_parallel_backend=request.param[1],
        allow_inexact_groups=True,
    )


@dataclass
class Worker:
    built: BuiltEngine
    ranks: list[BaseProcess]
    running: asyncio.Task[None]


@asynccontextmanager
async def worker(settings: EngineSettings, **changes: Any) -> AsyncGenerator[Worker]:  # noqa: ANN401
    """A group whose step loop runs. At the end no process of it is left."""
    ranks: list[BaseProcess] = []
    networks = [None if over_nodes is None else network_of(over_nodes, index) for index in range(3)]
    if over_nodes is not None:
        changes |= {"tensor_parallel_nodes": changes.get("tensor_parallel_size", 1)}

    def start_ranks(settings: EngineSettings, meeting: Meeting) -> Ended:
        for index in range(1, settings.tensor_parallel_size):
            given = (settings, meeting, index, networks[index])
            ranks.append(RANKS.Process(target=rank_of_a_model, args=given))
        return started(ranks)

    starting = StartRanks(start_ranks, networks[0])
    built = build_engine(replace(settings, **changes), lambda _done, _total: None, starting)
    running = asyncio.create_task(built.engine.run())
    try:
        yield Worker(built, ranks, running)
        if not running.done():
            await built.engine.drain_publications()
            load = built.engine.load()
            assert (load.live_bytes, load.running_rows, load.waiting_rows) == (0, 0, 0)
    finally:
        running.cancel()
        await asyncio.wait({running})
        built.close()
        await asyncio.to_thread(end, ranks)


def requests() -> list[Request]:
    """Prompts of all lengths near a page boundary; one of them repeats itself, so that guesses come true."""
    rng = Random(1)
    prompts = [tuple(rng.randrange(2, VOCABULARY) for _ in range(n)) for n in (1, P, P + 1, 3 * P - 1, 90)]
    prompts.append((3, 4, 5, 6) * 12)
    return [
        Request(
            request_id=f"{len(prompt)}-{sampling.temperature}",
            tokens=prompt,
            max_new_tokens=3 * P,
            sampling=sampling,
        )
        for prompt in prompts
        for sampling in (Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.95, seed=5))
    ]


async def answers(worker: Worker) -> list[list[int]]:
    return [
        tokens
        for tokens, _ in await asyncio.gather(*(answer(worker.built, request) for request in requests()))
    ]


@pytest.fixture(scope="module")
def wanted(alone: EngineSettings) -> list[list[int]]:
    async def main() -> list[list[int]]:
        async with worker(alone, overlap=False) as single:
            return [
                (await answer(single.built, replace(request, salt=request.request_id)))[0]
                for request in requests()
            ]

    found = asyncio.run(main())
    assert len(set(map(tuple, found))) == len(found)
    return found


@pytest.mark.parametrize(("size", "drafts_max"), [(2, 0), (3, 3)])
async def test_tokens_are_those_of_one_process(
    settings: EngineSettings, wanted: list[list[int]], size: int, drafts_max: int
) -> None:
    async with worker(settings, tensor_parallel_size=size, num_speculative_tokens=drafts_max) as group:
        assert await answers(group) == wanted
        assert await answers(group) == wanted  # warm
        counters = group.built.engine.load().counters
        assert drafts_max == 0 or counters["spec_accepted_tokens"] > counters["spec_drafted_tokens"] // 10


def test_group_scores_a_prompt_as_one_process_does(settings: EngineSettings) -> None:
    sampling = Sampling(temperature=0, prompt_logprobs=2)
    asked = [replace(prompt_request, sampling=sampling) for prompt_request in requests()]

    async def scores(group: Worker, request: Request) -> list[TokenLogprob]:
        async with aclosing(group.built.engine.generate(request)) as deltas:
            return [score async for delta in deltas for score in delta.prompt_logprobs]

    async def main(**changes: object) -> list[list[TokenLogprob]]:
        async with worker(settings, **changes) as group:
            return await asyncio.gather(*(scores(group, request) for request in asked))

    wanted = asyncio.run(main())
    assert [len(scored) for scored in wanted] == [len(scored.tokens) - 1 for scored in asked]
    found = asyncio.run(main(tensor_parallel_size=2))
    assert (found == wanted) != settings.sums
    for score, wanted_score in zip(chain(*found), chain(*wanted), strict=True):
        assert isclose(score.logprob, wanted_score.logprob, abs_tol=1e-3)


async def test_step_that_breaks_before_the_ranks_know_of_it_is_its_own_requests_error(
    settings: EngineSettings, wanted: list[list[int]]
) -> None:
    async with worker(settings, tensor_parallel_size=2) as group:
        good = asyncio.gather(*(answer(group.built, request) for request in requests()))
        with pytest.raises(RequestError):
            await answer(group.built, replace(requests()[0], tokens=(5, VOCABULARY)))
        assert [tokens for tokens, _ in await good] == wanted


@pytest.mark.parametrize("drafts_max", [0, 2])
async def test_draw_that_breaks_leaves_the_ranks_together(
    settings: EngineSettings, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, drafts_max: int
) -> None:
    """They wait for the tokens that were not drawn: in the step after it, or for their own guesses."""
    draw, calls = TorchRunner._draw, 0

    def breaks_at_times(self: TorchRunner, step: Step, outputs: Outputs) -> list[Drawn]:
        nonlocal calls
        calls += 1
        if calls in {7, 60}:
            raise ValueError("no luck")
        return draw(self, step, outputs)

    monkeypatch.setattr(TorchRunner, "_draw", breaks_at_times)
    async with worker(settings, tensor_parallel_size=2, num_speculative_tokens=drafts_max) as group:
        assert await answers(group) == wanted
        assert calls > 60


@pytest.mark.parametrize("amid", ["the model", "the guesses"])
async def test_leader_that_breaks_amid_a_step_ends_the_group(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, amid: str
) -> None:
    """The other ranks wait for it there, and nothing else would wake them."""

    def breaks(*_: object) -> None:
        raise ValueError("no luck")

    drafts_max = int(amid == "the guesses")
    async with worker(settings, tensor_parallel_size=3, num_speculative_tokens=drafts_max) as group:
        await answer(group.built, requests()[0])
        if drafts_max:
            monkeypatch.setattr(TorchRunner, "_choose", breaks)
        else:
            monkeypatch.setattr(runner, "logits_of", breaks)
        with pytest.raises(WorkerGone, match="the worker's step loop has ended"):
            await answer(group.built, requests()[1])
        with pytest.raises(GroupBroken, match="no luck"):
            await group.running
        await asyncio.to_thread(end, group.ranks)
