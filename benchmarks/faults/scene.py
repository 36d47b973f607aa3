"""A server under a load of streams, each of which is compared with what it was in a calm."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.support.e2e.faults import Run, rows_of, run, run_until
from tests.support.e2e.history import Ask, Call, asks, broken, pauses_s, percentile
from tests.support.e2e.server import Server

_Result = TypeVar("_Result")

MEMORY = ("--memory", "64MiB")
WIDTH = 8
STARTS_MAX = 4
LOOK_S = 0.05
PERCENTILES = (50, 99, 100)


@contextmanager
def serving(options: Sequence[str], log: Path, module: str = "tidemill") -> Generator[Server]:
    """A server of the bundled model; when it is stopped, no process and no file of it is left."""
    server = _started(["keeper", "--port", "0", *MEMORY, *options], log, module)
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def _started(arguments: Sequence[str], log: Path, module: str) -> Server:
    """Ray gives up on itself after 30 s, which a busy machine may need."""
    for _ in range(STARTS_MAX - 1):
        try:
            return Server(arguments, log, module)
        except AssertionError:
            sys.stderr.write(f"once more, for it did not start:\n{log.read_text()}")
    return Server(arguments, log, module)


class Load:
    """Streams of all kinds, one after another, `width` at a time."""

    def __init__(self, server: Server, width: int = WIDTH, seed: int = 6, max_tokens: int = 240) -> None:
        self.server = server
        self._width = width
        self._stood_still_s = 0.0
        self._asks: list[Ask] = asks(Random(seed), 24, num_tokens=300, max_tokens=max_tokens)
        self._calm: list[Call] = asyncio.run(run(server, self._asks, "calm", width=width)).calls
        assert not [one for call in self._calm if (one := broken(call, call))]

    def under(self, salt: str, work: Callable[[], Awaitable[_Result]]) -> tuple[Run, _Result]:
        """Keep the load up until `work` has ended."""

        async def main() -> tuple[Run, _Result]:
            done = asyncio.Event()
            looking = asyncio.create_task(self._look())
            load = asyncio.create_task(run_until(self.server, self._asks, salt, self._width, done))
            try:
                result = await work()
            finally:
                done.set()
                found = await load
                looking.cancel()
            return found, result

        return asyncio.run(main())

    async def _look(self) -> None:
        """Record whether this process itself was delayed, because pauses then say nothing about the
        server."""
        self._stood_still_s = 0.0
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            late_s = time.monotonic() - before_s - LOOK_S
            self._stood_still_s = max(self._stood_still_s, late_s)

    def once(self, salt: str) -> list[Call]:
        """All of them once; `verdict` takes them, one such list behind the other."""
        return asyncio.run(run(self.server, self._asks, salt, width=self._width)).calls

    @staticmethod
    def firsts_s(calls: Sequence[Call]) -> list[float]:
        """Return the seconds until the first token of each call."""
        return [call.chunks[0].at_s - call.sent_s for call in calls if call.chunks]

    def verdict(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Count the streams that failed, and the others whose tokens differ from the calm run."""
        failed = [call.trouble for call in calls if call.trouble]
        pairs = zip(calls, cycle(self._calm), strict=False)
        changed = [problem for call, calm in pairs if not call.trouble and (problem := broken(call, calm))]
        for problem in [*failed, *changed]:
            sys.stderr.write(f"trouble: {problem}\n")
        return {
            "streams": len(calls),
            "failed": len(failed),
            "changed": len(changed),
            "client_stood_still_s": round(self._stood_still_s, 3),
        }


def pauses(calls: Sequence[Call], times_s: Sequence[float]) -> dict[str, Any]:
    """Return the pauses of the calls that were in progress at these times. For calls that had a token the
    pause is between two tokens, for the others until the first one."""
    streaming: list[float] = []
    asking: list[float] = []
    for at_s in times_s:
        begun = [call for call in calls if call.chunks and call.chunks[0].at_s <= at_s]
        streaming += pauses_s(begun, at_s)
        asking += pauses_s([call for call in calls if call not in begun], at_s)
    return {
        "streams_under_way": len(streaming),
        "pause_s": spread(sorted(streaming)),
        "prompts_under_way": len(asking),
        "pause_of_prompts_s": spread(sorted(asking)),
    }


def every_second(calls: Sequence[Call]) -> list[float]:
    """Times of a run without faults: what pauses the machine makes by itself."""
    begin_s, end_s = min(call.sent_s for call in calls), max(call.ended_s for call in calls)
    return [begin_s + at for at in range(2, int(end_s - begin_s))]


def spread(sorted_s: Sequence[float]) -> dict[str, float]:
    names = ("p50", "p99", "max")
    if not sorted_s:
        return {}
    return {name: round(percentile(sorted_s, at), 3) for name, at in zip(names, PERCENTILES, strict=True)}


async def until_all_are_back(server: Server, names: frozenset[str], settle_s: float) -> None:
    """All workers, each with a store that is used."""
    while True:
        rows = await asyncio.to_thread(rows_of, server) or []
        there = {row["info"]["name"] for row in rows if row["state"] == "ready"}
        if there >= names and not any(row["load"]["counters"]["store_is_down"] for row in rows):
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(settle_s)


def names_of(server: Server) -> frozenset[str]:
    return frozenset(row["info"]["name"] for row in server.workers())
