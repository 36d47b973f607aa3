"""The logprobs of a prompt are those of one plain pass over it, to the bit, whatever runs beside it."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import MIB, serving, together, tokens_of
from tests.support.parity.steps import Runner
from tests.support.workers.logprobs import token_logprob
from tests.support.workers.settings import plain_settings
from tidemill.kernels.dispatch import Operators
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import Request, Sampling, TokenLogprob
from tidemill.workers.models.architectures.registry import load

P = 16
LENGTHS = (2, 16, 17, 33, 64, 90, 150)


def scored(seed: int, count: int) -> Request:
    return Request(
        request_id=f"{seed}",
        tokens=tokens_of(count, seed),
        max_new_tokens=5,
        sampling=Sampling(temperature=0, prompt_logprobs=3),
    )


def definition(folder: Path, cpu: Operators, request: Request) -> list[TokenLogprob]:
    """All logits of the prompt in one forward pass of nothing else."""
    model = load(folder, cpu, lambda _done, _total: None)
    tokens = list(request.tokens)
    logprobs_TV = Runner(model, page_tokens=P).run(tokens, [len(tokens)]).double().log_softmax(dim=-1)
    return [token_logprob(row_V, token, 3) for row_V, token in zip(logprobs_TV, tokens[1:], strict=False)]


async def scores(built: BuiltEngine, request: Request) -> list[TokenLogprob]:
    async with aclosing(built.engine.generate(request)) as deltas:
        return [score async for delta in deltas for score in delta.prompt_logprobs]


@pytest.mark.parametrize("name", ["qwen3_next/dense-tied", "qwen3_next/moe-two-values"])
@pytest.mark.parametrize("step_tokens_max", [40, 512])
async def test_every_path_gives_the_logprobs_of_a_plain_pass(
    name: str, step_tokens_max: int, cpu: Operators, kernel_cache: Path, tmp_path: Path
) -> None:
    folder = save(random_model(name), tmp_path)
    sizes = {"page_size": P, "max_model_len": 200, "max_num_seqs": 8}
    sizes |= {"max_num_batched_tokens": step_tokens_max}
    settings = plain_settings(folder, kernel_cache, 24 * MIB, backing="fixed", **sizes)
    asked = [scored(seed, count) for seed, count in enumerate(LENGTHS)]
    wanted = [definition(folder, cpu, request) for request in asked]
    plain = [replace(prompt_request, sampling=Sampling(temperature=0)) for prompt_request in asked]

    for changes in ({}, {"overlap": False, "num_speculative_tokens": 3}):
        async with serving(settings, **changes) as built:
            answered = await together(built, plain)
            found = asyncio.gather(*(scores(built, request) for request in asked))  # all of it is kept by now
            assert await together(built, plain) == answered
            assert await found == wanted
