"""A whole engine on a device, without Ray: graphs, backings, a budget that changes, pages from a store.

Weights are float32, so that no rounding of theirs decides between two tokens.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.heads import folder_with_head
from tests.support.parity.served import MIB, answer, generated, one_by_one, serving, together, tokens_of
from tests.support.workers.settings import plain_settings
from tidemill import LLM, SamplingParams
from tidemill.cluster.offline.llm import settings_of
from tidemill.kvstore.memory.backing import Kvcached
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.execution.cuda_graphs import Graphs
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.inputs import Inputs
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAGE_TOKENS = 16
NEW_TOKENS = 24
ON_DEVICE: dict[str, Any] = {"device": "cuda"}

needs_kvcached = pytest.mark.skipif(find_spec("kvcached") is None, reason="needs kvcached")
BACKINGS = ["fixed", pytest.param("kvcached", marks=needs_kvcached)]


@pytest.fixture(scope="module", params=["keeper", "qwen3_next/moe-two-values"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "keeper":
        return bundled()["keeper"]
    return save(random_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def settings(folder: Path, kernel_cache: Path) -> EngineSettings:
    sizes = {"memory_max_bytes": 512 * MIB, "page_size": PAGE_TOKENS, "kv_cache_dtype": "float32"}
    sizes |= {"max_num_seqs": 12, "max_num_batched_tokens": 128, "max_model_len": 512}
    return plain_settings(folder, kernel_cache, 256 * MIB, backing="fixed", **sizes, **ON_DEVICE)


def requests() -> list[Request]:
    """Prompts of one token to several steps, each with seeds or greedy."""
    return [
        Request(
            request_id=str(index),
            tokens=tokens_of(length, index, first=0),
            max_new_tokens=NEW_TOKENS + index,
            sampling=Sampling(temperature=0.0 if index % 3 else 0.8, seed=index),
        )
        for index, length in enumerate((1, 15, 16, 17, 40, 64, 100, 130, 200, 333))
    ]


@asynccontextmanager
async def running(settings: EngineSettings, **changes: object) -> AsyncGenerator[BuiltEngine]:
    """Run an engine, and check that its device memory is freed."""
    async with serving(settings, **changes) as built:
        yield built
    built.close()


async def answers(settings: EngineSettings, **changes: object) -> list[list[int]]:
    async with running(settings, **changes) as built:
        return await together(built, requests())


@pytest.fixture(scope="module")
def wanted(settings: EngineSettings) -> list[list[int]]:
    """Each alone, without graphs, in steps that hold a whole prompt."""

    async def main() -> list[list[int]]:
        async with running(settings, enforce_eager=True, max_num_batched_tokens=1024) as built:
            return await one_by_one(built, requests())

    found = asyncio.run(main())
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


@pytest.mark.parametrize("drafts_max", [0, 3])
@pytest.mark.parametrize("backing", BACKINGS)
async def test_graphs_answer_as_steps_without(
    settings: EngineSettings,
    wanted: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    backing: str,
    drafts_max: int,
) -> None:
    """Batches shrink as answers end; guesses are not part of a graph."""
    replayed: list[int] = []
    forward = Graphs.forward

    def counted(self: Graphs, step: Inputs) -> torch.Tensor | None:
        hidden_TH = forward(self, step)
        if hidden_TH is not None:
            replayed.append(len(hidden_TH))
        return hidden_TH

    monkeypatch.setattr(Graphs, "forward", counted)
    drafts = {"backing": backing, "num_speculative_tokens": drafts_max}
    assert await answers(settings, enforce_eager=True, **drafts) == wanted
    assert not replayed
    assert await answers(settings, **drafts) == wanted
    assert len(set(replayed)) > 2


@pytest.mark.parametrize("eager", [False, True])
async def test_ways_of_steps_answer_alike_overlapped(
    settings: EngineSettings, wanted: list[list[int]], *, eager: bool
) -> None:
    assert await answers(settings, enforce_eager=eager, async_scheduling=True) == wanted


async def test_ways_of_steps_answer_alike_on_states_in_bfloat16(settings: EngineSettings) -> None:
    found = [
        await answers(settings, state_dtype="bfloat16", enforce_eager=eager, async_scheduling=overlapped)
        for eager, overlapped in ((True, False), (False, False), (False, True))
    ]
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize("eager", [False, True])
async def test_ways_of_steps_answer_alike_with_guesses_of_a_head(
    tmp_path: Path, kernel_cache: Path, *, eager: bool
) -> None:
    folder = folder_with_head(tmp_path / "model", agrees=True)
    sizes = {"page_size": PAGE_TOKENS, "kv_cache_dtype": "float32", "max_model_len": 512}
    headed = plain_settings(folder, kernel_cache, 256 * MIB, backing="fixed", **sizes, **ON_DEVICE)
    plain = await answers(headed, enforce_eager=True)
    assert await answers(headed, enforce_eager=eager, num_speculative_tokens=3) == plain


@pytest.mark.parametrize("backing", BACKINGS)
async def test_budget_goes_down_and_up_while_they_run(
    settings: EngineSettings, wanted: list[list[int]], backing: str
) -> None:
    async with running(settings, backing=backing) as built:
        work = asyncio.create_task(together(built, requests()))
        for tokens, budget_bytes in ((20, 0), (50, 512 * MIB), (90, 0), (130, 512 * MIB)):
            await generated(built, tokens)
            built.engine.resize(budget_bytes)
        assert await work == wanted
        built.engine.resize(0)
        assert await together(built, requests()) == wanted


@needs_kvcached
async def test_budget_that_falls_gives_memory_back() -> None:
    """Cached memory stays mapped until the budget is the least."""

    def long(number: int) -> Request:
        return Request(request_id=str(number), tokens=tokens_of(500, number, first=0), max_new_tokens=1)

    keeper = settings_of("keeper", {"memory": "256MiB", "page_size": PAGE_TOKENS, **ON_DEVICE})
    async with running(keeper, max_model_len=512, enforce_eager=True) as built:
        await together(built, [long(number) for number in range(40)])
        before = free_bytes()
        built.engine.resize(0)
        assert free_bytes() - before >= 4 * Kvcached.GRANULE_BYTES


def free_bytes() -> int:
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.parametrize("backing", BACKINGS)
async def test_fetched_prompt_answers_as_a_cold_one(
    settings: EngineSettings, wanted: list[list[int]], tmp_path: Path, backing: str
) -> None:
    """Pages and states go through pinned memory to files and back, into another engine's memory."""
    asked = [request for request in requests() if len(request.tokens) > 2 * PAGE_TOKENS]
    colder = [tokens for request, tokens in zip(requests(), wanted, strict=True) if request in asked]
    changes: dict[str, Any] = {"backing": backing, "store_url": f"file://{tmp_path}/store?size=1GiB"}
    async with running(settings, **changes) as built:
        for request in asked:
            produced = await built.engine.produce(request)
            assert produced.depth == (len(request.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS
    async with running(settings, **changes) as built:
        found = [await answer(built, request) for request in asked]
    assert [tokens for tokens, _ in found] == colder
    for request, (_, provenance) in zip(asked, found, strict=True):
        assert provenance.fetched_tokens == (len(request.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_questions_of_the_bundled_model(kernel_cache: Path) -> None:
    """All right, and token by token those of the CPU."""
    demo = json.loads((bundled()["keeper"] / "demo.json").read_text())
    chats = [
        [{"role": "user", "content": f"{demo['notebook']} {item['question']}"}] for item in demo["questions"]
    ]
    greedy = SamplingParams(temperature=0, max_tokens=48)
    common: dict[str, Any] = {"memory": "256MiB", "kv_cache_dtype": "float32"}
    common["cache_folder"] = kernel_cache
    on_device: dict[str, Any] = common | ON_DEVICE | {"backing": "fixed"}
    found: list[list[list[int]]] = []
    for settings in (common, on_device):
        with LLM("keeper", **settings) as llm:
            outputs = llm.chat(chats, greedy, progress=False)
            assert [output.outputs[0].text.strip() for output in outputs] == [
                item["answer"].strip() for item in demo["questions"]
            ]
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
