"""Measure what attacks do to a well-behaved client: the server on one core, the clients on another.

python -m benchmarks.serving.abuse [--only WORD] [--tls] [--grpc]

Each attack of benchmarks.serving.attacks runs beside streams whose answers are known, a ping each 50 ms and a
request for one token each 250 ms.
Before it the same runs without an attack, and the worst gap of that is subtracted: other work on the machine
makes gaps too.
Of several rounds the smallest worst gap counts, for the same reason.
Beside it stands the longest time for which the event loop of the edge was held, in CPU time, and the same of
all its threads (benchmarks/serving/watched.py).
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import psutil
import trustme
from tests.support.e2e.history import Ask, Call, broken
from tests.support.e2e.server import NO_TLS, Server
from tests.support.e2e.streams import client_of

from benchmarks.serving import watched
from benchmarks.serving.attacks import ATTACKS, Attack, target_of
from benchmarks.serving.grpc_attacks import GRPC_ATTACKS

_Result = TypeVar("_Result")

RESULT = Path(__file__).parents[1] / "results" / "abuse.json"
ARGUMENTS = (
    "keeper",
    "--port",
    "0",
    "--grpc-port",
    "0",
    "--prefill",
    "1",
    "--decode",
    "1",
    "--memory",
    "256MiB",
)
GRPC_ADDRESS = re.compile(r'gRPC on ([^\s"]+)')
STREAMS = 4
STREAM_TOKENS = 300
CALM_S = 3.0
PING_S, POST_S, LOOK_S = 0.05, 0.25, 0.05
GAP_MS_MAX = {"body": 50.0, "flood": 250.0, "soak": inf}
GROWTH_MIB_MAX = 64.0


@dataclass
class Seen:
    """The observations of the well-behaved client, and the memory of the edge."""

    gaps_s: list[float] = field(default_factory=list[float])
    waits_s: list[float] = field(default_factory=list[float])  # of pings and requests
    streams: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list[str])
    edge_mib: list[float] = field(default_factory=list[float])
    hold_s: float = 0.0
    process_hold_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one attack. Goals: GAP_MS_MAX, GROWTH_MIB_MAX, and no refused or broken answer."""

    name: str
    kind: str
    gap_ms: float  # beyond the calm
    calm_gap_ms: float
    wait_ms: float  # the longest ping or request, beyond the calm
    hold_ms: float  # of the event loop of the edge
    process_hold_ms: float
    growth_mib: float
    streams: int
    refused: int
    broken: int
    statuses: dict[str, int]
    trouble: list[str]

    @property
    def misses(self) -> list[str]:
        return [
            *(["gap"] if self.gap_ms > GAP_MS_MAX[self.kind] else []),
            *(["memory"] if self.growth_mib > GROWTH_MIB_MAX else []),
            *(["refused"] if self.refused else []),
            *(["broken"] if self.broken else []),
            *(["5xx"] if any(status.startswith("5") for status in self.statuses) else []),
        ]

    def line(self) -> str:
        return (
            f"{self.name:36} {self.kind:6} {self.gap_ms:8.0f} {self.calm_gap_ms:8.0f} {self.wait_ms:8.0f} "
            f"{self.hold_ms:5.0f} {self.process_hold_ms:5.0f} {self.growth_mib:7.0f} "
            f"{self.refused:5} {self.broken:5}  {' '.join(self.misses) or 'good':12} "
            f"{json.dumps(self.statuses)}"
        )


HEADING = (
    f"{'attack':36} {'kind':6} {'gap ms':>8} {'calm ms':>8} {'wait ms':>8} "
    f"{'hold':>5} {'CPU':>5} {'MiB':>7} {'429':>5} {'wrong':>5}"
)


class GoodClient:
    """Streams with known answers, pings and short requests, while a window is open."""

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

    async def learn(self) -> None:
        """Ask everything once in a calm."""
        async with client_of(self._server.url, self._tls) as client:
            for ask in self._asks:
                call = Call(ask)
                await call.run(client, "good")
                assert not broken(call, call), broken(call, call)
                self._known.append(call)

    async def window(self, work: Awaitable[_Result]) -> tuple[Seen, _Result]:
        """Return what is seen until `work` is done and open streams have ended, and its result."""
        seen, done = Seen(), asyncio.Event()
        async with client_of(self._server.url, self._tls) as client, asyncio.TaskGroup() as running:
            for _ in range(STREAMS):
                running.create_task(self._stream(client, seen, done))
            running.create_task(self._every(PING_S, client.get, "/ping", {}, seen, done))
            body = {"json": {"model": "keeper", "prompt": [70], "max_tokens": 1}}
            running.create_task(self._every(POST_S, client.post, "/v1/completions", body, seen, done))
            running.create_task(self._look(seen, done))
            await asyncio.sleep(0.5)
            watched.longest_s(self._holds_file)
            result = await work
            await asyncio.sleep(0.5)
            seen.hold_s, seen.process_hold_s = watched.longest_s(self._holds_file)
            done.set()
        return seen, result

    async def _stream(self, client: httpx.AsyncClient, seen: Seen, done: asyncio.Event) -> None:
        while not done.is_set():
            index = next(self._numbers) % len(self._asks)
            call = Call(self._asks[index])
            await call.run(client, "good")
            seen.streams += 1
            if any(trouble.startswith(("status 429", "status 503")) for trouble in call.trouble):
                seen.refused += 1
            elif problems := broken(call, self._known[index]):
                seen.broken += problems[:1]
            seen.gaps_s += [after.at_s - before.at_s for before, after in pairwise(call.chunks)]

    async def _every(
        self,
        pause_s: float,
        send: Callable[..., Awaitable[httpx.Response]],
        path: str,
        options: dict[str, Any],
        seen: Seen,
        done: asyncio.Event,
    ) -> None:
        while not done.is_set():
            began_s = time.monotonic()
            try:
                status = (await send(path, **options)).status_code
            except httpx.HTTPError as error:
                seen.broken.append(f"{path}: {error!r}")
                continue
            seen.waits_s.append(time.monotonic() - began_s)
            if status in (429, 503):
                seen.refused += 1
            elif status != 200:
                seen.broken.append(f"{path}: status {status}")
            await asyncio.sleep(pause_s)

    async def _look(self, seen: Seen, done: asyncio.Event) -> None:
        while not done.is_set():
            seen.edge_mib.append(self._edge.memory_info().rss / 2**20)
            await asyncio.sleep(LOOK_S)


@contextmanager
def on_cores(cores: Sequence[int]) -> Generator[None]:
    """Run the block, and what it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def begun(server: Server, attack: Attack) -> asyncio.subprocess.Process:
    """Start the process of an attacker, which attacks when it gets a line."""
    name = "grpc_attacks" if attack.name in GRPC_ATTACKS else "attacks"
    url = server.url
    if attack.name in GRPC_ATTACKS:
        url = f"{url.split(':')[0]}://{GRPC_ADDRESS.findall(server.log())[0]}"
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"benchmarks.serving.{name}", url, attack.name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


async def sent(server: Server, attack: Attack, statuses: dict[str, int]) -> None:
    """Run an attacker and count the statuses of its answers."""
    process = await begun(server, attack)
    printed, _ = await process.communicate(b"\n")
    for status, times in json.loads(printed.splitlines()[-1]).items():
        statuses[status] = statuses.get(status, 0) + times


async def measured(server: Server, good: GoodClient, attack: Attack, rounds: int) -> Verdict:
    calm: list[Seen] = []
    under: list[Seen] = []
    statuses: dict[str, int] = {}
    for _ in range(rounds):
        process = await begun(server, attack)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"built\n"
        calm.append((await good.window(asyncio.sleep(CALM_S)))[0])
        seen, (printed, _) = await good.window(process.communicate(b"\n"))
        under.append(seen)
        for status, times in json.loads(printed).items():
            statuses[status] = statuses.get(status, 0) + times

    def hold_ms(name: str) -> float:
        return round(1000 * min(getattr(seen, name) for seen in under), 1)

    def worst_ms(windows: list[Seen], name: str) -> float:
        return 1000 * min(max(getattr(seen, name)) for seen in windows)

    calm_ms = worst_ms(calm, "gaps_s")
    return Verdict(
        name=attack.name,
        kind=attack.kind,
        gap_ms=round(worst_ms(under, "gaps_s") - calm_ms, 1),
        calm_gap_ms=round(calm_ms, 1),
        wait_ms=round(worst_ms(under, "waits_s") - worst_ms(calm, "waits_s"), 1),
        hold_ms=hold_ms("hold_s"),
        process_hold_ms=hold_ms("process_hold_s"),
        growth_mib=round(
            max(max(seen.edge_mib) - before.edge_mib[-1] for before, seen in zip(calm, under, strict=True)), 1
        ),
        streams=sum(seen.streams for seen in under),
        refused=sum(seen.refused for seen in under),
        broken=sum(len(seen.broken) for seen in under),
        statuses=statuses,
        trouble=[problem for seen in under for problem in seen.broken][:3],
    )


def certificate(folder: Path) -> list[str]:
    """Write a certificate for localhost; return the options that name it."""
    issued = trustme.CA().issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return ["--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem")]


async def measure(server: Server, attacks: Sequence[Attack], rounds: int) -> list[Verdict]:
    good = GoodClient(server)
    await good.learn()
    await good.window(asyncio.sleep(CALM_S))
    print(HEADING, flush=True)
    verdicts: list[Verdict] = []
    for attack in attacks:
        verdicts.append(await measured(server, good, attack, rounds))
        print(verdicts[-1].line(), flush=True)
    return verdicts


async def soaked(server: Server, attacks: Sequence[Attack], seconds: float, seed: int) -> list[Verdict]:
    """Return one verdict on attacks that are drawn at random, one to three at a time, beside the good client.

    Gaps are not judged: attacks overlap. Answers and memory are.
    """
    rng = Random(seed)
    good = GoodClient(server)
    await good.learn()
    calm, _ = await good.window(asyncio.sleep(CALM_S))
    found: dict[str, int] = {}

    async def draw() -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            drawn = rng.sample(list(attacks), rng.randrange(1, 4))
            print(" + ".join(attack.name for attack in drawn), flush=True)
            await asyncio.gather(*(sent(server, attack, found) for attack in drawn))
            await asyncio.sleep(rng.random())

    seen, _ = await good.window(draw())
    verdict = Verdict(
        name="all, at random",
        kind="soak",
        gap_ms=round(1000 * (max(seen.gaps_s) - max(calm.gaps_s)), 1),
        calm_gap_ms=round(1000 * max(calm.gaps_s), 1),
        wait_ms=round(1000 * (max(seen.waits_s) - max(calm.waits_s)), 1),
        hold_ms=round(1000 * seen.hold_s, 1),
        process_hold_ms=round(1000 * seen.process_hold_s, 1),
        growth_mib=round(seen.edge_mib[-1] - calm.edge_mib[-1], 1),
        streams=seen.streams,
        refused=seen.refused,
        broken=len(seen.broken),
        statuses=found,
        trouble=seen.broken[:3],
    )
    print(f"{HEADING}\n{verdict.line()}\n{seen.streams} streams")
    return [verdict]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.abuse")
    parser.add_argument("--only", default="", help="attacks whose kind or name has this in it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--soak-s", type=float, default=0.0, help="attacks at random for this time instead")
    parser.add_argument("--seed", type=int, default=1, help="of the soak")
    parser.add_argument("--tls", action="store_true", help="all of it over TLS")
    parser.add_argument("--grpc", action="store_true", help="attack the gRPC port instead")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    attacks = [
        attack
        for attack in (GRPC_ATTACKS if options.grpc else ATTACKS).values()
        if options.only in f"{attack.kind} {attack.name}" and (options.tls or "TLS" not in attack.name)
    ]
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        more = certificate(Path(folder)) if options.tls else []
        with on_cores(cores[:1]):
            server = Server([*ARGUMENTS, *more], Path(folder) / "log", watched.__name__)
        try:
            with on_cores(cores[1:] or cores):
                verdicts = asyncio.run(
                    soaked(server, attacks, options.soak_s, options.seed)
                    if options.soak_s
                    else measure(server, attacks, options.rounds)
                )
            with suppress(psutil.Error):
                print(f"edge at the end: {server.processes()[0].memory_info().rss / 2**20:.0f} MiB")
        finally:
            server.stop()
    found = [vars(verdict) for verdict in verdicts]
    if not options.soak_s:
        options.output.write_text(json.dumps({"tls": options.tls, "attacks": found}, indent=1) + "\n")
    missed = [verdict for verdict in verdicts if verdict.misses]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} attacks within the goals")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
