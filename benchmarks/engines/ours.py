"""Tidemill with vLLM as the engine of its workers, beside vLLM alone."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from statistics import median

from tests.support.e2e.engine_streams import STREAMS, asks, processes, streamed, wait_for_both
from tests.support.e2e.history import Call

from benchmarks.engines.scene import Figure, Scene, ask, prompts

ROUNDS = 5


def under_our_router(scene: Scene) -> Iterator[Figure]:
    """Yield what our edge and worker add to first tokens of one client, and to the time of 8 streams.

    Both servers run, and get the same prompts in turn.
    """
    rng = Random(1)
    with scene.vllm() as alone, scene.tidemill("--mixed", "1") as ours:
        urls = alone.url, ours.url
        firsts: list[list[float]] = [[], []]
        for prompt in prompts(rng, 10 * ROUNDS, 64):
            for times_s, url in zip(firsts, urls, strict=True):
                times_s.append(ask(url, [prompt], 1).first_token_s)
        alone_s, ours_s = map(median, firsts)
        yield Figure(
            "added time to the first token, ms",
            (ours_s - alone_s) * 1e3,
            5,
            f"medians {ours_s * 1e3:.1f} and {alone_s * 1e3:.1f} ms",
        )
        walls: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            asked = prompts(rng, STREAMS, 64)
            for times_s, url in zip(walls, urls, strict=True):
                times_s.append(ask(url, asked, 128, STREAMS).wall_s)
        alone_s, ours_s = map(median, walls)
        yield Figure(
            f"time of {STREAMS} streams by that of vLLM alone",
            ours_s / alone_s,
            1.03,
            f"medians {ours_s:.2f} and {alone_s:.2f} s",
        )


def killed(scene: Scene) -> Iterator[Figure]:
    """Yield the longest pause of 8 streams over two vLLMs after a kill -9 of one, beyond the time of a
    prompt."""
    with scene.tidemill("--mixed", "2") as ours:
        asked = asks(scene.model)
        calm = asyncio.run(streamed(ours, asked))
        prefill_s = max(call.chunks[0].at_s - call.sent_s for call in calm)
        pauses: list[float] = []
        for _ in range(ROUNDS):
            wait_for_both(ours)
            calls = asyncio.run(streamed(ours, asked, processes(ours, "VLLM::EngineCore")[0]))
            if cut := [call.trouble for call in calls if call.trouble]:
                raise SystemExit(f"a stream was cut: {cut[0]}")
            pauses.append(max(map(longest_gap_s, calls)))
        yield Figure(
            f"longest pause of {STREAMS} streams after a kill, beyond a prompt's {prefill_s:.2f} s",
            max(pauses) - prefill_s,
            2,
            f"pauses {', '.join(f'{pause_s:.2f}' for pause_s in sorted(pauses))} s",
        )


def longest_gap_s(call: Call) -> float:
    """Return the longest time between two chunks of a stream."""
    return max(after.at_s - before.at_s for before, after in pairwise(call.chunks))
