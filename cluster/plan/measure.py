"""Measure a server of one worker on this machine with a few requests, from a process of its own."""

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from random import Random
from statistics import median

from tidemill.cluster.bench.client import LoadClient, RequestResult
from tidemill.cluster.bench.command import find_model, open_http
from tidemill.cluster.bench.load import run_load
from tidemill.cluster.bench.workloads import drawn_tokens, from_prompts
from tidemill.cluster.plan.calibration import (
    Calibration,
    CalibrationError,
    PromptTime,
    StreamTime,
    busy_s,
    fit,
)

PROMPT_SHARES = (0.25, 1.0, 2.0)
"""The lengths of the prompts that are measured, as parts of the length of the load."""

ROWS = {1: 8, 2: 6, 4: 4, 16: 1}
"""The numbers of streams, and how often each is measured."""

TURNS = 9
PAUSE_S = 0.05
"""The pause before a prompt: a worker in service is idle now and then, and slower after it."""

ANSWER_TOKENS = 48
BESIDE_ROWS = 2
"""The streams beside which prompts are measured. They have three times as many tokens."""

SEED_BITS = 32


async def calibrate(url: str, model: str, prompt_tokens: int, threads: int, step_tokens: int) -> Calibration:
    """Measure the server at `url`, whose model is called `model`, with prompts about as long as
    `prompt_tokens`. Raises CalibrationError."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        prompts, streams, beside_s = await asyncio.get_running_loop().run_in_executor(
            pool, _measure, url, prompt_tokens
        )
    speed, request_s = fit(prompts, streams, step_tokens)
    return Calibration(
        model=model,
        threads=threads,
        speed=speed,
        request_s=request_s,
        busy_s=busy_s(beside_s, prompt_tokens, BESIDE_ROWS, (speed, request_s), step_tokens),
        context_tokens=prompt_tokens,
        load=os.getloadavg()[0],
    )


Measured = tuple[list[PromptTime], list[StreamTime], float]
"""Times of prompts alone, of streams, and of a prompt beside BESIDE_ROWS streams."""


def _measure(url: str, prompt_tokens: int) -> Measured:
    return asyncio.run(_ask(url, prompt_tokens))


async def _ask(url: str, prompt_tokens: int) -> Measured:
    async with open_http(url) as http:
        model, vocab_size = await find_model(http)
        client = LoadClient(
            http=http,
            clock_s=time.perf_counter,
            model=model,
            fields={"temperature": 0, "ignore_eos": True},
            hints=False,
        )
        seeds = count(time.time_ns() % (1 << SEED_BITS))  # prompts that no cache has

        async def ask(number: int, num_tokens: int, answer_tokens: int) -> list[RequestResult]:
            rng = Random(next(seeds))  # noqa: S311  a workload
            prompts = [drawn_tokens(rng, vocab_size, num_tokens) for _ in range(number)]
            results = await run_load(client, from_prompts("calibration", prompts, answer_tokens))
            if errors := [result.error for result in results if result.error]:
                raise CalibrationError(f"the calibration failed: {errors[0]}")
            return results

        await ask(max(ROWS), prompt_tokens, ANSWER_TOKENS)  # the first steps of a worker are slow
        lengths = sorted({max(2, round(share * prompt_tokens)) for share in PROMPT_SHARES})

        async def first_s(length: int) -> float:
            await asyncio.sleep(PAUSE_S)
            return (await ask(1, length, 2))[0].ttft_s

        prompts = [
            PromptTime(length, median([await first_s(length) for _ in range(TURNS)])) for length in lengths
        ]
        streams = [
            StreamTime(
                rows, median([_gap_s(await ask(rows, prompt_tokens, ANSWER_TOKENS)) for _ in range(turns)])
            )
            for rows, turns in ROWS.items()
        ]

        async def beside_s() -> float:
            others = asyncio.create_task(ask(BESIDE_ROWS, prompt_tokens, 3 * ANSWER_TOKENS))
            await asyncio.sleep(BESIDE_ROWS * prompts[-1].seconds)  # until they stream
            first = await ask(1, prompt_tokens, 2)
            await others
            return first[0].ttft_s

        beside = median([await beside_s() for _ in range(TURNS)])
    return prompts, streams, beside


def _gap_s(results: Sequence[RequestResult]) -> float:
    """Return the time between tokens while all streams run: in the first half of the gaps prompts run beside
    them."""
    gaps_s = [gap_s for result in results for gap_s in result.gaps_s[len(result.gaps_s) // 2 :]]
    return median(gaps_s)
