# pyright: basic
# transformers' classes have no usable types; settings are replaced by name.
"""Each architecture on a device with bfloat16 weights and memory: logprobs of prompts, and CUDA graphs.

Tiles are whole pages, moved by the copy engine. The float32 of test_engine.py takes another path.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import answer, serving
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.settings import EngineSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ON_DEVICE: dict[str, Any] = {"device": "cuda", "backing": "fixed"}
MIB = 1 << 20
VOCABULARY = 97
LENGTHS = (70, 1, 150)
NEW_TOKENS = 90
NEAR = 0.1
"""Nats, in the median: a kernel that is wrong is off by more than one."""

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3/tied": {},
    "qwen3_moe/all": {},
    "qwen3_next/moe-two-values": {},
    "gpt_oss/page-wide": {},
    "granitemoehybrid/moe": {},
    "deepseek_v3/plain-query": {"kv_lora_rank": 64, "qk_rope_head_dim": 16},
}
"""The changes to random models: heads of powers of two, 16 elements or more, for the copy engine."""


@pytest.fixture(params=CHANGES)
def settings(request: pytest.FixtureRequest, tmp_path: Path, kernel_cache: Path) -> EngineSettings:
    model = random_model(request.param, **CHANGES[request.param]).bfloat16()
    return EngineSettings(
        model_folder=save(model, tmp_path / "model"),
        memory_bytes=64 * MIB,
        store_url="memory:?size=0",
        cache_folder=kernel_cache,
        kv_cache_dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=320,
    )


def requests() -> list[Request]:
    draw = torch.Generator().manual_seed(3)
    return [
        Request(
            request_id=str(length),
            tokens=tuple(torch.randint(2, VOCABULARY, (length,), generator=draw).tolist()),
            max_new_tokens=NEW_TOKENS,
            salt=str(length),
        )
        for length in LENGTHS
    ]


async def scores(built: BuiltEngine, request: Request) -> list[float]:
    asked = replace(request, max_new_tokens=1, sampling=Sampling(temperature=0.0, prompt_logprobs=0))
    async with aclosing(built.engine.generate(asked)) as deltas:
        return [score.logprob async for delta in deltas for score in delta.prompt_logprobs]


def answers(settings: EngineSettings, **changes: object) -> tuple[list[float], list[list[int]]]:
    """Return each answer alone: in the same steps, so that no sum has another order."""

    async def main() -> tuple[list[float], list[list[int]]]:
        async with serving(settings, **changes) as built:
            scored = [score for request in requests() for score in await scores(built, request)]
            return scored, [(await answer(built, request))[0] for request in requests()]

    return asyncio.run(main())


def test_prompts_are_as_likely_as_on_cpu_and_graphs_change_nothing(settings: EngineSettings) -> None:
    wanted, _ = answers(settings)
    steps, without = answers(settings, enforce_eager=True, **ON_DEVICE)
    graphs, tokens = answers(settings, **ON_DEVICE)
    apart = (torch.tensor(steps) - torch.tensor(wanted)).abs()
    assert len(wanted) == sum(length - 1 for length in LENGTHS)
    assert float(apart.median()) < NEAR
    assert graphs == steps
    assert tokens == without
    assert all(len(token) == NEW_TOKENS for token in tokens)
