"""Models with each kind of memory on groups of 2, 3 and 4 processes that start as in the product, over gloo:
the tokens of one process, and of prompts that a group of another size has computed.

The ranks of every architecture are threads in test_architectures.py."""

import asyncio
from dataclasses import replace
from itertools import starmap
from pathlib import Path

import pytest

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import MIB, answer, serving
from tests.support.parity.sharded import sizes_of
from tests.support.workers.settings import plain_settings
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

FOUR: dict[str, dict[str, int]] = {
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 12},
}
"""The changes to the first shape of an architecture that let four ranks share it."""
THREE = {"gpt_oss": "gpt_oss/page-wide"}
KEEPER = "keeper"
QUICK = {(KEEPER, "fast"), ("gpt_oss", "exact")}
CASES = [
    (KEEPER, "exact"),
    (KEEPER, "fast"),
    ("gpt_oss", "exact"),
    ("deepseek_v3", "fast"),
    ("granitemoehybrid", "exact"),
    ("qwen3_next", "fast"),
]
PROMPTS = tuple(tuple((7 * number + 3 * place) % 90 + 3 for place in range(40)) for number in (1, 2))
NEW_TOKENS = 8


def _case(name: str, reduce: str, checkpoint_dtype: str = "auto") -> object:
    quick = (name, reduce) in QUICK or checkpoint_dtype != "auto"
    return pytest.param(name, reduce, checkpoint_dtype, marks=[] if quick else pytest.mark.slow)


def folders_of(name: str, scratch: Path) -> list[Path]:
    if name == KEEPER:
        return [bundled()[KEEPER]]
    found = [save(random_model(name, **FOUR.get(name, {})), scratch / "two or four")]
    if name in THREE:
        found.append(save(random_model(THREE[name]), scratch / "three"))
    return found


def requests() -> list[Request]:
    return [
        Request(
            request_id=str(number), tokens=tokens, max_new_tokens=NEW_TOKENS, sampling=Sampling(temperature=0)
        )
        for number, tokens in enumerate(PROMPTS)
    ]


async def answers(settings: EngineSettings) -> list[list[int]]:
    async with serving(settings) as built:
        return [(await answer(built, request))[0] for request in requests()]


async def computed_and_continued(group: EngineSettings) -> list[list[int]]:
    """Let the group compute the first prompt, and continue the second one, which one process has produced."""
    computed, produced = requests()
    async with serving(group, tensor_parallel_size=1) as built:
        await built.engine.produce(produced)
    async with serving(group) as built:
        found = [await answer(built, request) for request in (computed, replace(produced, gap_tokens_max=0))]
    assert [bool(provenance.fetched_tokens) for _, provenance in found] == [False, True]
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize(
    ("name", "reduce", "checkpoint_dtype"),
    [*starmap(_case, CASES), _case(KEEPER, "exact", "bfloat16")],
)
def test_groups_answer_as_one_process(
    name: str, reduce: str, checkpoint_dtype: str, kernel_cache: Path, tmp_path: Path
) -> None:
    tried = set[int]()
    for folder in folders_of(name, tmp_path):
        sizes = {"page_size": 16, "checkpoint_dtype": checkpoint_dtype}
        alone = plain_settings(folder, kernel_cache, 48 * MIB, **sizes)
        wanted = asyncio.run(answers(alone))
        for size in set(sizes_of(folder)) - tried:
            tried.add(size)
            group = replace(
                alone,
                store_url=f"file://{tmp_path}/store-{size}?size=64MiB",
                tensor_parallel_size=size,
                tensor_parallel_sizes=(1, size),
                tensor_parallel_reduce=reduce,
                tensor_parallel_backend="gloo",
                allow_inexact_groups=True,
            )
            assert asyncio.run(computed_and_continued(group)) == wanted, f"{size} ranks"
    assert tried
