"""Memory management of real engines changes no logits: they are those of the cold path.

Every bit is compared in fp32. The arena is cut into extents of one state, so that a few requests exceed it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import generated, one_by_one, serving, together, tokens_of
from tests.support.workers.settings import plain_settings
from tidemill.kvstore.layout import KvDtype, Layout, StateDtype, layout_of
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.engine import memory_plan
from tidemill.workers.execution import model_runner as runner
from tidemill.workers.execution.step import Drawn, Row
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

P = 16
NEW_TOKENS = 20
LONGEST = 160
EXTENTS = 20

Logits = dict[tuple[int, int], torch.Tensor]
"""The logits by the seed of the request, which is unique, and the position of the drawn token."""


@pytest.fixture(scope="module", params=["keeper", "gpt_oss/alternating"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "keeper":
        return bundled()["keeper"]
    return save(random_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Record the logits of every draw."""
    seen: Logits = {}
    draw = runner.Sampler.draw

    def recorded(
        sampler: runner.Sampler, logits_NV: torch.Tensor, rows: list[Row], tokens_N: torch.Tensor | None
    ) -> list[Drawn]:
        found = draw(sampler, logits_NV, rows, tokens_N)
        first = 0
        for row, drawn in zip(rows, found, strict=True):
            assert row.sampling_state is not None
            for count in range(len(drawn.tokens)):  # what lies behind a wrong guess is not drawn from
                position = row.end - row.drafts + count
                seen[row.sampling_state.sampling.seed, position] = logits_NV[first + count].clone()
            first += row.drafts + 1
        return found

    monkeypatch.setattr(runner.Sampler, "draw", recorded)
    monkeypatch.setattr(memory_plan, "layout_of", partial(layout_of, extent_bytes_min=1, granule_bytes=1))
    return seen


@dataclass(frozen=True)
class Cold:
    """Each prompt alone, with a salt of its own, and the whole of it in one step where the grid allows."""

    first: list[list[int]]
    second: list[list[int]]
    logits: Logits


@dataclass(frozen=True)
class Bed:
    """Settings with memory for `EXTENTS`, what was drawn since the last look, and what is known of the cold
    path of this model."""

    settings: EngineSettings
    layout: Layout
    logits: Logits
    colds: dict[str, Cold]

    @property
    def extent_bytes(self) -> int:
        return self.layout.extent_bytes

    def memory_for(self, num_pages: int) -> int:
        """Return the bytes that hold this many pages beside five states."""
        states = -(-5 // max(1, self.layout.states_per_extent))
        return (-(-num_pages // self.layout.pages_per_extent) + states) * self.extent_bytes


Beds = Callable[..., Bed]  # by the types of pages and states


@pytest.fixture(scope="module")
def colds(folder: Path) -> dict[str, Cold]:
    """Return the cold logits of this folder, by the request."""
    del folder
    return {}


@pytest.fixture
def bed(folder: Path, kernel_cache: Path, logits: Logits, colds: dict[str, Cold]) -> Beds:
    def make(
        kv_dtype: KvDtype, state_dtype: StateDtype = "float32", checkpoint_dtype: StateDtype | None = None
    ) -> Bed:
        layers, _ = describe(folder)
        dtypes = kv_dtype, state_dtype, checkpoint_dtype if layout_of(layers, P).has_states else None
        layout = layout_of(layers, P, *dtypes, extent_bytes_min=1, granule_bytes=1)
        types: dict[str, Any] = {"kv_cache_dtype": kv_dtype, "state_dtype": state_dtype}
        types["checkpoint_dtype"] = dtypes[2] or "auto"
        sizes = {"page_size": P, "max_model_len": LONGEST, "backing": "fixed"}
        settings = plain_settings(folder, kernel_cache, EXTENTS * layout.extent_bytes, **types, **sizes)
        return Bed(settings, layout, logits, colds)

    return make


def conversations() -> list[Request]:
    """Prompts that part inside and behind their second page, greedy and drawn."""
    shared = tokens_of(3 * P - 5, 1, first=0)
    return [
        Request(
            request_id=str(index),
            tokens=shared[: 2 * P + 8 * (index % 2)] + tokens_of(3 + 4 * index, 100 + index, first=0),
            max_new_tokens=NEW_TOKENS + index,
            sampling=Sampling(temperature=0.9 * (index % 2), top_p=0.95, seed=index),
        )
        for index in range(8)
    ]


def next_turns(requests: list[Request], answers: list[list[int]]) -> list[Request]:
    return [
        replace(
            request,
            request_id=f"{request.request_id} again",
            tokens=(*request.tokens, *tokens, *tokens_of(5, index, first=0)),
            max_new_tokens=NEW_TOKENS,
            sampling=replace(request.sampling, seed=request.sampling.seed + 1000),
        )
        for index, (request, tokens) in enumerate(zip(requests, answers, strict=True))
    ]


async def cold_of(bed: Bed, requests: list[Request]) -> Cold:
    dtypes = bed.settings.kv_cache_dtype, bed.settings.state_dtype, bed.settings.checkpoint_dtype
    asked = f"{dtypes} {requests}"
    if asked not in bed.colds:
        async with serving(bed.settings, max_num_batched_tokens=4096) as built:
            first = await one_by_one(built, requests)
            second = await one_by_one(built, next_turns(requests, first))
        bed.colds[asked] = Cold(first, second, dict(bed.logits))
        bed.logits.clear()
    return bed.colds[asked]


def compare(bed: Bed, cold: Cold) -> None:
    """Compare everything drawn since the last call bit by bit."""
    assert bed.logits
    for key, warm_V in bed.logits.items():
        assert torch.equal(warm_V, cold.logits[key]), key
    bed.logits.clear()


@pytest.mark.parametrize(
    ("strategy", "policy", "interval", "drafts_max", "overlap", "checkpoint_dtype"),
    [
        ("none", "lru", 16, 4, True, None),
        ("double", "value", 32, 0, True, None),
        ("double", "value", 16, 2, True, "bfloat16"),
        ("lazy", "lru", 16, 3, True, None),
        ("lazy", "value", 48, 3, False, None),
    ],
)
async def test_eviction_junctions_thinning_and_budgets(
    bed: Beds,
    strategy: CheckpointStrategy,
    policy: Policy,
    interval: int,
    drafts_max: int,
    checkpoint_dtype: StateDtype | None,
    *,
    overlap: bool,
) -> None:
    one = bed("float32", checkpoint_dtype=checkpoint_dtype)
    tight = {"checkpoint_strategy": strategy, "eviction_policy": policy, "checkpoint_interval": interval}
    tight |= {"num_speculative_tokens": drafts_max, "overlap": overlap}
    most_bytes = 60 * one.extent_bytes

    cold = await cold_of(one, conversations())
    async with serving(one.settings, **tight, checkpoints_per_path=1, memory_max_bytes=most_bytes) as built:
        for _ in range(2):
            assert await together(built, conversations()) == cold.first
            assert await together(built, next_turns(conversations(), cold.first)) == cold.second
            compare(one, cold)
        counters = built.engine.load().counters
        assert counters["kv_hit_without_state_tokens"] > 0
        assert strategy == "none" or counters["evicted_checkpoints_for_cap"] > 0
        built.engine.resize(50 * one.extent_bytes)
        work, before = asyncio.create_task(together(built, conversations())), counters["generated_tokens"]
        for tokens, budget_bytes in ((24, 0), (40, most_bytes), (90, 0), (120, 1 << 40)):
            await generated(built, int(before) + tokens)
            built.engine.resize(budget_bytes)
        assert await work == cold.first
        compare(one, cold)
        counters = built.engine.load().counters
        assert counters["preemptions_for_resize"] > 0
        built.engine.resize(0)
        assert await together(built, next_turns(conversations(), cold.first)) == cold.second
        compare(one, cold)
        counters = built.engine.load().counters
        assert sum(counters.get(f"evicted_pages_for_{why}", 0) for why in ("pages", "states", "resize")) > 0


@pytest.mark.parametrize("drafts_max", [0, 4])
@pytest.mark.parametrize(
    ("strategy", "kv_dtype", "checkpoint_dtype"),
    [
        ("none", "float32", None),
        ("lazy", "float32", "bfloat16"),
        ("lazy", "fp8_per_token_head", None),
    ],
)
async def test_preemption(
    bed: Beds,
    strategy: CheckpointStrategy,
    kv_dtype: KvDtype,
    checkpoint_dtype: StateDtype | None,
    drafts_max: int,
) -> None:
    """Short prompts are admitted together; their answers do not fit together."""
    one = bed(kv_dtype, checkpoint_dtype=checkpoint_dtype)
    requests = [
        replace(request, tokens=tokens_of(9 + index, 200 + index, first=0), max_new_tokens=60)
        for index, request in enumerate(conversations()[:5])
    ]

    cold = await cold_of(one, requests)
    async with serving(
        one.settings,
        memory_bytes=one.memory_for(10),
        checkpoint_strategy=strategy,
        num_speculative_tokens=drafts_max,
    ) as built:
        assert await together(built, requests) == cold.first
        compare(one, cold)
        assert built.engine.load().counters["preemptions"] > 0


@pytest.mark.parametrize(
    ("kv_dtype", "state_dtype", "checkpoint_dtype", "extents", "changes"),
    [
        ("bfloat16", "float32", None, 100, {}),
        ("fp8", "float32", None, 100, {}),
        ("fp8_per_token_head", "float32", None, 100, {}),
        ("float32", "bfloat16", None, EXTENTS, {"num_speculative_tokens": 3, "checkpoint_interval": 16}),
        ("float32", "float32", "bfloat16", EXTENTS, {"num_speculative_tokens": 3, "checkpoint_interval": 16}),
    ],
)
async def test_memory_in_fewer_bits(
    bed: Beds,
    kv_dtype: KvDtype,
    state_dtype: StateDtype,
    checkpoint_dtype: StateDtype | None,
    extents: int,
    changes: dict[str, int],
) -> None:
    """Keys, values and states are rounded token by token, or on page boundaries, before another token sees
    them: every path has the same bits."""
    one = bed(kv_dtype, state_dtype, checkpoint_dtype)

    cold = await cold_of(one, conversations())
    async with serving(one.settings, **changes, memory_bytes=extents * one.extent_bytes) as built:
        for _ in range(2):
            assert await together(built, conversations()) == cold.first
            compare(one, cold)
            assert await together(built, next_turns(conversations(), cold.first)) == cold.second
            compare(one, cold)
