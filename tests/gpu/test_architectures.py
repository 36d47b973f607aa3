"""Each architecture on a device with bfloat16 weights and memory: logprobs of prompts, and CUDA graphs.

Tiles are whole pages, moved by the copy engine. The float32 of test_engine.py takes another path.
"""

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.engine import recomputed

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import MIB, one_by_one, serving, tokens_of
from tests.support.workers.settings import plain_settings
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.execution import model_runner
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.settings import EngineSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ON_DEVICE: dict[str, Any] = {"device": "cuda", "backing": "fixed"}
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
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 320}
    folder = save(model, tmp_path / "model")
    return plain_settings(folder, kernel_cache, 64 * MIB, kv_cache_dtype="bfloat16", **sizes)


def requests() -> list[Request]:
    return [
        Request(request_id=str(n), tokens=tokens_of(n, seed=n), max_new_tokens=NEW_TOKENS, salt=str(n))
        for n in LENGTHS
    ]


async def scores(built: BuiltEngine, request: Request) -> list[float]:
    asked = replace(request, max_new_tokens=1, sampling=Sampling(temperature=0.0, prompt_logprobs=0))
    async with aclosing(built.engine.generate(asked)) as deltas:
        return [score.logprob async for delta in deltas for score in delta.prompt_logprobs]


async def answers(settings: EngineSettings, **changes: object) -> tuple[list[float], list[list[int]]]:
    """Return each answer alone: in the same steps, so that no sum has another order."""
    async with serving(settings, **changes) as built:
        scored = [score for request in requests() for score in await scores(built, request)]
        return scored, await one_by_one(built, requests())


async def test_prompts_are_as_likely_as_on_cpu_and_graphs_change_nothing(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without graphs are padded as those with: other sizes of a product may have other sums."""
    wanted, _ = await answers(settings)
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "cuda_capture", lambda _: recomputed)
        steps, without = await answers(settings, **ON_DEVICE)
    graphs, tokens = await answers(settings, **ON_DEVICE)
    apart = (torch.tensor(steps) - torch.tensor(wanted)).abs()
    assert len(wanted) == sum(length - 1 for length in LENGTHS)
    assert float(apart.median()) < NEAR
    assert graphs == steps
    assert tokens == without
    assert all(len(token) == NEW_TOKENS for token in tokens)
