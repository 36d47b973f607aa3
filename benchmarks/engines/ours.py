"""Tidemill with vLLM as the engine of its workers, beside vLLM alone."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from statistics import median

from tests.support.e2e.engine_streams import (
    STREAMS,
    asks,
    longest_pause_s,
    processes,
    streamed,
    wait_for_both,
    wait_for_successor,
)

from benchmarks.engines.scene import NAME, Figure, Scene, ask, prompts

ROUNDS = 5


def under_our_router(scene: Scene) -> Iterator[Figure]:
    """Yield what our edge and worker add to first tokens of one client, and to the time of 8 streams.

    Both servers run, and get the same prompts in turn, each first every second time.
    """
    rng = Random(1)
    with scene.vllm() as alone, scene.tidemill("--mixed", "1") as ours:
        urls = ours.url, alone.url
        firsts = [
            _in_turn(urls, index, lambda url, prompt=prompt: ask(url, [prompt], 1).first_token_s)
            for index, prompt in enumerate(prompts(rng, 20 * ROUNDS, 64))
        ]
        yield Figure(
            "added time to the first token, ms",
            median(ours_s - alone_s for ours_s, alone_s in firsts) * 1e3,
            5,
            _medians(firsts),
        )
        asked = [prompts(rng, STREAMS, 64) for _ in range(2 * ROUNDS)]
        walls = [
            _in_turn(urls, index, lambda url, each=each: ask(url, each, 128, STREAMS).wall_s)
            for index, each in enumerate(asked)
        ]
        yield Figure(
            f"time of {STREAMS} streams by that of vLLM alone",
            median(ours_s / alone_s for ours_s, alone_s in walls),
            1.03,
            _medians(walls),
        )


def _in_turn(urls: tuple[str, str], index: int, measure: Callable[[str], float]) -> tuple[float, float]:
    """Return the times of ours and of vLLM alone; the index decides which is first."""
    if index % 2:
        alone_s = measure(urls[1])
        return measure(urls[0]), alone_s
    return measure(urls[0]), measure(urls[1])


def _medians(times_s: list[tuple[float, float]]) -> str:
    ours_s, alone_s = (median(times) for times in zip(*times_s, strict=True))
    return f"medians {ours_s:.3g} and {alone_s:.3g} s"


def killed(scene: Scene) -> Iterator[Figure]:
    """Yield the longest pause of 8 streams over two vLLMs after a kill -9 of one, beyond the time of a
    prompt."""
    with scene.tidemill("--mixed", "2") as ours:
        asked = asks(NAME)
        calm = asyncio.run(streamed(ours, asked))
        prefill_s = max(call.chunks[0].at_s - call.sent_s for call in calm)
        pauses: list[float] = []
        for _ in range(ROUNDS):
            wait_for_both(ours)
            lives = ours.lives()
            calls = asyncio.run(streamed(ours, asked, processes(ours, "VLLM::EngineCore")[0]))
            if cut := [call.trouble for call in calls if call.trouble]:
                raise SystemExit(f"a stream was cut: {cut[0]}")
            pauses.append(longest_pause_s(calls))
            wait_for_successor(ours, lives)
        yield Figure(
            f"longest pause of {STREAMS} streams after a kill, beyond a prompt's {prefill_s:.2f} s",
            max(pauses) - prefill_s,
            2,
            f"pauses {', '.join(f'{pause_s:.2f}' for pause_s in sorted(pauses))} s",
        )
