"""Measure what attacks do to a well-behaved client: the server on one core, the clients on another.

python -m benchmarks.serving.abuse [--kind body|flood|reset] [--only WORD ...] [--tls] [--grpc] [--soak-s S]

Each attack of benchmarks.serving.attacks runs beside streams whose answers are known, a ping each 50 ms and a
request for one token each 250 ms (benchmarks/serving/good_client.py), after a calm of the same.
An attack that misses by a gap alone runs again, up to --rounds times, and its smallest gap counts: other work
on the machine makes gaps too (benchmarks/serving/verdicts.py).
Beside the gap stands the longest time for which the event loop of the edge was held, in CPU time, and the
same of all its threads (benchmarks/serving/watched.py).
An attack that could not end before --s-max does not run, and is listed as such.
The exit status is 1 if an attack missed, else 75 if one did not run, 77 if one was not judged, or 0.
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
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import psutil
import trustme
from tests.support.e2e.server import Server

from benchmarks.serving import watched
from benchmarks.serving.attacks import ATTACK_S_MAX, ATTACKS, Attack
from benchmarks.serving.good_client import GoodClient
from benchmarks.serving.grpc_attacks import GRPC_ATTACKS
from benchmarks.serving.verdicts import GAP_MS_MAX, GOOD, HEADING, STATUSES, Verdict, verdict_of, worst
from tidemill.cluster.processes.endpoint.run_endpoint import RETURN_S

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
CALM_S = 2.0


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
    """Start the process of an attacker, which attacks when it gets a line.

    It shares a core with the good client and must not delay it, so it has a lower priority.
    """
    name = "grpc_attacks" if attack.name in GRPC_ATTACKS else "attacks"
    url = server.url
    if attack.name in GRPC_ATTACKS:
        url = f"{url.split(':')[0]}://{GRPC_ADDRESS.findall(server.log())[0]}"
    return await asyncio.create_subprocess_exec(
        *("nice", "-n", "5", sys.executable, "-m", f"benchmarks.serving.{name}", url, attack.name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


async def sent(server: Server, attack: Attack, statuses: dict[str, int]) -> None:
    """Run an attacker and count the statuses of its answers."""
    process = await begun(server, attack)
    printed, _ = await process.communicate(b"\n")
    for status, times in json.loads(printed.splitlines()[-1]).items():
        statuses[status] = statuses.get(status, 0) + times


async def measured(server: Server, good: GoodClient, attack: Attack) -> Verdict:
    """Run an attack once, after a calm."""
    process = await begun(server, attack)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"built\n"
    calm = await good.calm(CALM_S)
    ended = asyncio.create_task(process.communicate(b"\n"))
    seen = await good.during(ended)
    statuses = json.loads((await ended)[0])
    return verdict_of(attack.name, attack.kind, calm, seen, statuses, seen.edge_mib - calm.last_mib)


def certificate(folder: Path) -> list[str]:
    """Write a certificate for localhost; return the options that name it."""
    issued = trustme.CA().issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return ["--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem")]


async def measure(server: Server, attacks: Sequence[Attack], rounds: int, end_s: float) -> list[Verdict]:
    """Return a verdict on each attack. Those that might not end before `end_s` do not run."""
    good = GoodClient(server)
    print(HEADING, flush=True)
    verdicts: list[Verdict] = []
    worst_calm_ms = 0.0
    async with good.running():
        for attack in attacks:
            verdict = Verdict(name=attack.name, kind=attack.kind, statuses={}, has_run=False)
            for _ in range(rounds):
                if time.monotonic() + ATTACK_S_MAX > end_s:
                    break
                found = await measured(server, good, attack)
                worst_calm_ms = max(worst_calm_ms, found.calm_gap_ms)
                found = replace(found, run_calm_gap_ms=worst_calm_ms)
                verdict = verdict.with_round(found) if verdict.has_run else found
                if not verdict.may_be_noise:
                    break
            verdicts.append(verdict)
            print(verdict.line(), flush=True)
    return [replace(verdict, run_calm_gap_ms=worst_calm_ms) for verdict in verdicts]


async def soaked(server: Server, attacks: Sequence[Attack], seconds: float, seed: int) -> list[Verdict]:
    """Return one verdict on attacks that are drawn at random, one to three at a time, beside the good client.

    Gaps are not judged: attacks overlap. Answers are, and the memory that is held some seconds afterwards.
    """
    rng = Random(seed)
    good = GoodClient(server)
    found: dict[str, int] = {}

    async def draw() -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            drawn = rng.sample(list(attacks), rng.randrange(1, 4))
            print(" + ".join(attack.name for attack in drawn), flush=True)
            await asyncio.gather(*(sent(server, attack, found) for attack in drawn))
            await asyncio.sleep(rng.random())
        await asyncio.sleep(2 * RETURN_S)

    async with good.running():
        calm = await good.calm(CALM_S)
        seen = await good.during(draw())
    verdict = verdict_of("all, at random", "soak", calm, seen, found, seen.last_mib - calm.last_mib)
    print(f"{HEADING}\n{verdict.line()}\n{seen.streams} streams")
    return [verdict]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.abuse")
    parser.add_argument("--only", nargs="*", default=[""], help="attacks whose name has one of these in it")
    parser.add_argument("--kind", default="", choices=("", *GAP_MS_MAX), help="attacks of this kind")
    parser.add_argument("--rounds", type=int, default=3, help="the most rounds of an attack")
    parser.add_argument("--s-max", type=float, default=inf, help="the time for all of it")
    parser.add_argument("--soak-s", type=float, default=0.0, help="attacks at random for this time instead")
    parser.add_argument("--seed", type=int, default=1, help="of the soak")
    parser.add_argument("--tls", action="store_true", help="all of it over TLS")
    parser.add_argument("--grpc", action="store_true", help="attack the gRPC port instead")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    end_s = time.monotonic() + options.s_max
    attacks = [
        attack
        for attack in (GRPC_ATTACKS if options.grpc else ATTACKS).values()
        if any(word in attack.name for word in options.only)
        and options.kind in ("", attack.kind)
        and (options.tls or "TLS" not in attack.name)
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
                    else measure(server, attacks, options.rounds, end_s)
                )
            with suppress(psutil.Error):
                print(f"edge at the end: {server.processes()[0].memory_info().rss / 2**20:.0f} MiB")
        finally:
            server.stop()
    found = [{**vars(verdict), "verdict": verdict.verdict} for verdict in verdicts]
    if not options.soak_s:
        options.output.write_text(json.dumps({"tls": options.tls, "attacks": found}, indent=1) + "\n")
    for kind in STATUSES:
        names = [verdict.name for verdict in verdicts if verdict.verdict == kind]
        print(f"{kind}: {len(names)} of {len(verdicts)}", *([] if kind == GOOD else names), sep="; ")
    sys.exit(STATUSES[worst([verdict.verdict for verdict in verdicts])])


if __name__ == "__main__":
    main()
