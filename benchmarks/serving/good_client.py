"""The well-behaved client of benchmarks.serving.abuse: streams with known answers, pings, short requests.

It goes on while attacks begin and end, so an attack costs no time for streams to start and to finish.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import inf
from random import Random
from typing import Any

import httpx
from tests.support.e2e.history import Ask, Call, broken
from tests.support.e2e.server import NO_TLS, Server
from tests.support.e2e.streams import client_of

from benchmarks.serving import watched
from benchmarks.serving.attacks import target_of

STREAMS = 4
STREAM_TOKENS = 300
PING_S, POST_S, LOOK_S = 0.05, 0.25, 0.05
SETTLE_S_MAX = 60.0
"""The longest wait for what was in progress when an attack ended."""

Span = tuple[float, float]
"""When something began and when it ended, in seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The observations of a part of the time."""

    gap_s: float  # the longest between two chunks of a stream
    wait_s: float  # the longest for a ping or for a request of one token
    lag_s: float  # the longest time for which this client itself was late, on its own core
    hold_s: float  # the longest hold of the event loop of the edge, in CPU time
    process_hold_s: float  # the same of all its threads
    edge_mib: float  # the most memory of the edge
    last_mib: float
    streams: int
    refused: int
    broken: list[str]


@dataclass
class _Log:
    """All observations since the last look that can still belong to a part."""

    waits: list[Span] = field(default_factory=list[Span])
    calls: list[Call] = field(default_factory=list[Call])
    edge_mib: list[float] = field(default_factory=list[float])
    lag_s: float = 0.0
    streams: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list[str])


class GoodClient:
    """Streams, pings and short requests at a server, and what they saw of it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tls = target_of(server.url).tls or NO_TLS
        self._edge = server.processes()[0]
        self._holds_file = server.temp_folder / watched.FILE
        rng = Random(3)
        self._asks = [
            Ask(
                "/v1/completions",
                {
                    "model": "keeper",
                    "prompt": [rng.randrange(100, 800) for _ in range(48)],
                    "max_tokens": STREAM_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "logprobs": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                },
            )
            for _ in range(2 * STREAMS)
        ]
        self._known: list[Call] = []
        self._numbers = count()
        self._log = _Log()
        self._waiting: dict[str, float] = {}  # by path: when a ping or a request was sent

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Ask everything once in a calm; then stream, ping and post until the block ends."""
        async with client_of(self._server.url, self._tls) as client:
            for ask in self._asks:
                call = Call(ask)
                await call.run(client, "good")
                assert not broken(call, call), broken(call, call)
                self._known.append(call)
            body = {"json": {"model": "keeper", "prompt": [70], "max_tokens": 1}}
            async with asyncio.TaskGroup() as group:
                tasks = [
                    *(group.create_task(self._stream(client)) for _ in range(STREAMS)),
                    group.create_task(
                        self._every(PING_S, client.get, "/ping", {"headers": {"Connection": "close"}})
                    ),
                    group.create_task(self._every(POST_S, client.post, "/v1/completions", body)),
                    group.create_task(self._look()),
                ]
                yield
                for task in tasks:
                    task.cancel()

    async def during(self, work: Awaitable[object]) -> Seen:
        """Return what is seen during `work`, also partly, and what was in progress at its end."""
        self._forget()
        began_s = time.monotonic()
        await work
        await asyncio.sleep(2 * LOOK_S)
        ended_s = time.monotonic()
        give_up_s = ended_s + SETTLE_S_MAX
        while self._oldest_s() < ended_s and time.monotonic() < give_up_s:  # noqa: ASYNC110 - a clock's
            await asyncio.sleep(LOOK_S)
        return self._seen(lambda span: span[1] > began_s and span[0] < ended_s)

    async def calm(self, seconds: float) -> Seen:
        """Return what is seen in this time without an attack, and only what begins and ends in it.

        What went wrong since the last attack counts too.
        """
        refused, wrong = self._log.refused, self._log.broken
        self._forget()
        self._log.refused, self._log.broken = refused, wrong
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        ended_s = time.monotonic()
        return self._seen(lambda span: span[0] >= began_s and span[1] <= ended_s)

    def _forget(self) -> None:
        self._log = _Log(calls=list(self._open_calls()), edge_mib=[self._edge_mib()])
        watched.longest_s(self._holds_file)

    def _oldest_s(self) -> float:
        """Return when the oldest of what is in progress began."""
        streams = (call.chunks[-1].at_s if call.chunks else call.sent_s for call in self._open_calls())
        return min((*streams, *self._waiting.values()), default=inf)

    def _open_calls(self) -> Iterator[Call]:
        return (call for call in self._log.calls if not call.ended_s)

    def _seen(self, counts: Callable[[Span], bool]) -> Seen:
        now_s = time.monotonic()
        log = self._log
        gaps = [(before.at_s, after.at_s) for call in log.calls for before, after in pairwise(call.chunks)]
        gaps += [(call.chunks[-1].at_s, now_s) for call in self._open_calls() if call.chunks]
        waits = [*log.waits, *((sent_s, now_s) for sent_s in self._waiting.values())]
        gap_s, wait_s = (
            max((span[1] - span[0] for span in spans if counts(span)), default=0.0) for spans in (gaps, waits)
        )
        hold_s, process_hold_s = watched.longest_s(self._holds_file)
        return Seen(
            gap_s=gap_s,
            wait_s=wait_s,
            lag_s=log.lag_s,
            hold_s=hold_s,
            process_hold_s=process_hold_s,
            edge_mib=max(log.edge_mib),
            last_mib=log.edge_mib[-1],
            streams=log.streams,
            refused=log.refused,
            broken=log.broken,
        )

    async def _stream(self, client: httpx.AsyncClient) -> None:
        while True:
            index = next(self._numbers) % len(self._asks)
            call = Call(self._asks[index])
            self._log.calls.append(call)
            await call.run(client, "good")
            log = self._log
            log.streams += 1
            if any(trouble.startswith(("status 429", "status 503")) for trouble in call.trouble):
                log.refused += 1
            elif problems := broken(call, self._known[index]):
                log.broken += problems[:1]

    async def _every(
        self,
        pause_s: float,
        send: Callable[..., Awaitable[httpx.Response]],
        path: str,
        options: dict[str, Any],
    ) -> None:
        while True:
            sent_s = self._waiting[path] = time.monotonic()
            try:
                status = (await send(path, **options)).status_code
            except httpx.HTTPError as error:
                self._log.broken.append(f"{path}: {error!r}")
                continue
            finally:
                del self._waiting[path]
            log = self._log
            log.waits.append((sent_s, time.monotonic()))
            if status in (429, 503):
                log.refused += 1
            elif status != 200:
                log.broken.append(f"{path}: status {status}")
            await asyncio.sleep(pause_s)

    async def _look(self) -> None:
        while True:
            self._log.edge_mib.append(self._edge_mib())
            due_s = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self._log.lag_s = max(self._log.lag_s, time.monotonic() - due_s)

    def _edge_mib(self) -> float:
        return self._edge.memory_info().rss / 2**20
