"""The two ways to sum: which groups share pages, what is refused, and the load of each rank's experts."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import answer, serving
from tests.support.workers.settings import plain_settings
from tidemill.kernels.shared.compute_dtype import BITS
from tidemill.kvstore.shards import shards_of
from tidemill.workers.engine.build import check_settings, namespace_of
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.settings import EngineSettings, SettingsError
from tidemill.workers.sources.names import bundled

KEEPER = bundled()["keeper"]
ALONE = plain_settings()
GROUP = replace(ALONE, tensor_parallel_size=2)
FAST = replace(GROUP, tensor_parallel_reduce="fast")
ANY = {"tensor_parallel_reduce": "fast", "allow_inexact_groups": True, "tensor_parallel_sizes": (1, 2)}
PROMPT = tuple(range(3, 60))


def namespace(settings: EngineSettings) -> str:
    layers, _ = describe(KEEPER)
    return namespace_of(settings, layers, shards_of(layers, {1, 2}))


def test_exact_groups_of_all_sizes_share_pages_and_fast_ones_only_if_allowed() -> None:
    exact = namespace(ALONE)
    assert namespace(GROUP) == namespace(replace(GROUP, tensor_parallel_reduce="exact")) == exact
    assert namespace(replace(ALONE, tensor_parallel_reduce="fast")) == exact, "one rank adds nothing up"
    two, four = namespace(FAST), namespace(replace(FAST, tensor_parallel_size=4))
    by_expert = namespace(replace(FAST, enable_expert_parallel=True))
    shared = {namespace(replace(ALONE, tensor_parallel_size=size, **ANY)) for size in (1, 2)}
    assert len(shared) == 1
    assert len({exact, two, four, by_expert, *shared}) == 5


def test_versions_whose_products_have_other_bits_share_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, half = ALONE, replace(ALONE, compute_dtype="bfloat16")
    now = [namespace(wide), namespace(half)]
    monkeypatch.setitem(BITS, "bfloat16", "bfloat16")  # of versions without decision 54
    assert namespace(wide) == now[0], "float32 has the bits that it had"
    assert namespace(half) not in now


def test_formats_of_pages_never_share_one() -> None:
    found = [
        namespace(replace(ALONE, kv_cache_dtype=name))
        for name in ("float32", "bfloat16", "fp8", "fp8_per_token_head")
    ]
    assert len(set(found)) == 4
    assert namespace(replace(ALONE, kv_cache_dtype="fp8_e4m3")) == found[2]
    assert namespace(replace(ALONE, kv_cache_dtype="auto")) == namespace(ALONE) == found[0]


def test_unequal_groups_that_round_in_different_ways_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"groups of 1 and 2 ranks .* add --allow-inexact-groups$"):
        replace(FAST, tensor_parallel_sizes=(1, 2))
    replace(FAST, tensor_parallel_sizes=(2,))
    replace(GROUP, tensor_parallel_sizes=(1, 2))
    replace(ALONE, **ANY)


def test_whole_experts_need_ranks_that_add_up() -> None:
    with pytest.raises(SettingsError, match=r"--enable-expert-parallel .* add --tensor-parallel-reduce fast"):
        replace(GROUP, enable_expert_parallel=True)
    assert not replace(ALONE, enable_expert_parallel=True).by_expert, "one rank has all experts"
    with pytest.raises(Exception, match=r"has no experts: leave out --enable-expert-parallel"):
        check_settings(replace(FAST, enable_expert_parallel=True))


def test_load_of_each_ranks_experts_is_counted(tmp_path: Path, kernel_cache: Path) -> None:
    """Two ranks with whole experts give the tokens of one, and each pair of a token and an expert counts."""
    folder = save(random_model("qwen3_moe/all", num_attention_heads=4), tmp_path / "model")
    alone = plain_settings(model_folder=folder, memory_bytes=16 << 20, cache_folder=kernel_cache)
    request = Request(request_id="1", tokens=PROMPT, max_new_tokens=12, sampling=Sampling(temperature=0))

    async def run(settings: EngineSettings) -> tuple[list[int], dict[str, float]]:
        async with serving(settings) as built:
            tokens, _ = await answer(built, request)
            return tokens, dict(built.engine.load().counters)

    wanted, without = asyncio.run(run(alone))
    group = replace(alone, tensor_parallel_size=2, tensor_parallel_reduce="fast", enable_expert_parallel=True)
    found, counters = asyncio.run(run(group))
    assert found == wanted
    assert not [name for name in without if name.startswith("expert_pairs")]
    pairs = [counters[f"expert_pairs_on_rank_{rank}"] for rank in range(2)]
    layers, top_k = 2, 3
    tokens = sum(pairs) / (layers * top_k)
    assert len(PROMPT) + len(found) - 1 <= tokens <= len(PROMPT) + len(found) + 1, "one step may run too many"
    assert min(pairs) > 0
