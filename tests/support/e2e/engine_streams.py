"""Streams over workers whose engine is another process, and kills under them."""

import asyncio
import signal
from collections.abc import Sequence
from itertools import pairwise

import httpx
import psutil

from tests.support.e2e.history import Ask, Call
from tests.support.e2e.server import Server, command_of, runs
from tests.support.waits import eventually

STREAMS = 8
TOKENS = 64
PROMPT_TOKENS = 31

CLIENT_S_MAX = 600.0


def asks(model: str, **fields: object) -> list[Ask]:
    """Return the requests of the streams: each has a prompt of its own."""
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    prompts = [[100 + index, *range(10, 9 + PROMPT_TOKENS)] for index in range(STREAMS)]
    return [Ask("/v1/completions", {**body, "prompt": prompt, **fields}) for prompt in prompts]


async def streamed(
    server: Server,
    asked: list[Ask],
    victim: psutil.Process | None = None,
    number: int = signal.SIGKILL,
    begun: int = STREAMS,
) -> list[Call]:
    """Run the streams, and send the victim a signal when the first `begun` have some tokens."""
    calls = [Call(ask) for ask in asked]
    async with httpx.AsyncClient(base_url=server.url, timeout=CLIENT_S_MAX) as client:
        running = [asyncio.create_task(call.run(client, salt="streams")) for call in calls]
        if victim is not None:
            for call in calls[:begun]:
                await call.reach(4)
            victim.send_signal(number)
        await asyncio.gather(*running)
    return calls


def text_of(call: Call) -> str:
    return "".join(chunk.text for chunk in call.choice(0))


def longest_pause_s(calls: Sequence[Call]) -> float:
    """Return the longest time between two chunks of a stream."""
    return max(after.at_s - before.at_s for call in calls for before, after in pairwise(call.chunks))


def compared(calls: list[Call], calm: list[Call]) -> str:
    """Return the longest pause, and how many answers are those of a calm run, in words."""
    equal = sum(text_of(call) == text_of(other) for call, other in zip(calls, calm, strict=True))
    return f"longest pause {longest_pause_s(calls):.2f} s, {equal} of {len(calls)} answers equal a calm run"


def processes(server: Server, name: str) -> list[psutil.Process]:
    """Return the running processes below the server whose command or name has `name`, but for guards."""
    running = [each for each in server.processes() if runs(each) and "guard.py" not in command_of(each)]
    return [each for each in running if name in f"{command_of(each)} {each.name()}"]


def wait_for_successor(server: Server, lives: dict[str, str]) -> None:
    """Wait until another process has the name of one of these workers."""
    eventually(lambda: server.lives().keys() == lives.keys() and server.lives() != lives)


def wait_for_both(server: Server) -> None:
    """Wait until both workers are there again."""
    eventually(lambda: [row["state"] for row in server.workers()] == ["ready", "ready"])
