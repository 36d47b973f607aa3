"""Measure how strangers affect each other, and what they learn: a server of keeper, two tenants, real
requests.

python -m benchmarks.serving.strangers

It first measures whether a tenant can tell by the time to an answer that another one has sent the same
prompt. The two kinds of prompts alternate. The Kolmogorov-Smirnov distance of their times is printed beside
that of a tenant's own prompts, which do come from a cache. Then it measures the time between the tokens of
streams beside requests whose grammars were made to explode, and beside as many harmless ones. The last part
is the worst gap of a stream beside 64 answers with a grammar of CROWDS. A part with 0 rounds is left out.
The exit status is 1 if that gap is more than CROWD_GAP_MS_MAX longer than beside answers without a grammar,
or 77 if it is not judged (benchmarks/serving/verdicts.py).
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml
from tests.support.e2e.server import Server

from benchmarks.serving.verdicts import STATUSES, gap_verdict, worst
from tidemill.cluster.bench.report import percentile

RESULT = Path(__file__).parents[1] / "results" / "strangers.json"
TENANTS = ("first", "second")
PROMPT_TOKENS = 513
STREAMS = 6
STREAM_TOKENS = 800
BOMBS: tuple[dict[str, Any], ...] = (
    {"regex": "a?" * 1600 + "a" * 800},
    {"regex": "(" + "|".join(f"[a-z]{{{length}}}q" for length in range(1, 300)) + ")*"},
    {"grammar": "start: " + '"a"? ' * 1600},
    {
        "grammar": "start: a0\n"
        + "".join(f'a{at}: a{at + 1} a{at + 1} | "x"?\n' for at in range(200))
        + 'a200: "y"?'
    },
    {"json": {"anyOf": [{"properties": {f"k{at}": {"type": "string"}}} for at in range(200)]}},
    {"json": {"type": "object", "properties": {f"k{at}": {"type": "integer"} for at in range(1000)}}},
)
CROWD_REQUESTS, CROWD_N, CROWD_TOKENS = 4, 16, 40
CROWD_GAP_MS_MAX = 50.0
CROWDS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "no grammar": {},
    "small object": {"json": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
    "anyOf of 1,000 objects": {
        "json": {"anyOf": [{"properties": {f"k{at}": {"type": "string"}}} for at in range(1000)]}
    },
    "anyOf of 250 objects": {
        "json": {"anyOf": [{"properties": {f"k{at}": {"type": "string"}}} for at in range(250)]}
    },
    "5,000 properties": {
        "json": {"type": "object", "properties": {f"k{at}": {"type": "integer"} for at in range(5000)}}
    },
    "1,000 properties": {
        "json": {"type": "object", "properties": {f"k{at}": {"type": "integer"} for at in range(1000)}}
    },
    "allOf of 4 multipleOf": {
        "json": {"allOf": [{"type": "integer", "multipleOf": of} for of in (7919, 7907, 7901, 7883)]}
    },
    "allOf of 20 patterns": {"json": {"type": "string", "allOf": [{"pattern": ".*a.{20}$"}] * 20}},
    "allOf of 40 patterns": {
        "json": {"type": "string", "allOf": [{"pattern": f".*{'abcd'[at % 4]}.{{20}}$"} for at in range(40)]}
    },
}
"""Structured outputs by name. Each is sent by CROWD_REQUESTS requests of CROWD_N choices concurrently."""


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of Kolmogorov and Smirnov: the largest difference of the two distribution
    functions."""
    return max(
        abs(sum(x <= at for x in one) / len(one) - sum(x <= at for x in other) / len(other))
        for at in (*one, *other)
    )


def distinguished(one: Sequence[float], other: Sequence[float]) -> float:
    """The distance that two samples of one distribution exceed in one of a hundred cases (Smirnov, 1948)."""
    return 1.63 * sqrt((len(one) + len(other)) / (len(one) * len(other)))


class Asker:
    def __init__(self, client: httpx.AsyncClient, key: str) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {key}"}

    async def answer_s(self, prompt: Sequence[int]) -> float:
        """Return the time to one token."""
        began_s = time.perf_counter()
        await self.whole({"prompt": prompt, "max_tokens": 1, "temperature": 0})
        return time.perf_counter() - began_s

    async def whole(self, body: dict[str, Any]) -> httpx.Response:
        reply = await self._client.post("/v1/completions", json=body, headers=self._headers)
        assert reply.status_code in {200, 400, 429}, reply.text
        return reply

    async def gaps_s(self, prompt: Sequence[int]) -> list[float]:
        """Between the chunks of a stream."""
        body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
        async with self._client.stream("POST", "/v1/completions", json=body, headers=self._headers) as reply:
            times = [time.perf_counter() async for line in reply.aiter_lines() if line.startswith("data: {")]
        return [after - before for before, after in pairwise(times)]


async def prefixes(askers: Sequence[Asker], rounds: int, rng: Random) -> dict[str, Any]:
    """Times of the second tenant, for prompts that it is the first to send and for such that the first tenant
    has just sent; and of the first tenant's own."""
    first, second = askers
    times: dict[str, list[float]] = {"unknown": [], "known to another": [], "known to itself": []}
    for _ in range(rounds):
        for kind in rng.sample(sorted(times), len(times)):
            prompt, other = ([rng.randrange(100, 800) for _ in range(PROMPT_TOKENS)] for _ in "ab")
            await first.answer_s(other if kind == "unknown" else prompt)
            asker = first if kind == "known to itself" else second
            times[kind].append(await asker.answer_s(prompt))
    unknown, another, itself = (times[kind] for kind in ("unknown", "known to another", "known to itself"))
    return {
        "rounds": rounds,
        "median_ms": {kind: 1000 * percentile(waits_s, 50) for kind, waits_s in times.items()},
        "distance": distance(unknown, another),
        "distance_of_its_own": distance(unknown, itself),
        "distance_by_chance_1_percent": distinguished(unknown, another),
    }


async def beside(askers: Sequence[Asker], forms: Sequence[dict[str, Any]], rng: Random) -> list[float]:
    """Gaps of the first tenant's streams while the second sends requests of these forms, one by one."""
    first, second = askers
    prompts = [[rng.randrange(100, 800) for _ in range(64)] for _ in range(STREAMS)]
    streams = [asyncio.create_task(first.gaps_s(prompt)) for prompt in prompts]
    for form in forms:
        await second.whole({"prompt": [5] * 20, "max_tokens": 20, **form})
    assert not all(stream.done() for stream in streams), "the streams have ended too early: make them longer"
    return [gap for stream in streams for gap in await stream]


async def bombs(askers: Sequence[Asker], rounds: int, rng: Random) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"harmless": [], "bombs": []}
    for _ in range(rounds):
        gaps["harmless"] += await beside(askers, [{}] * len(BOMBS), rng)
        gaps["bombs"] += await beside(askers, [{"structured_outputs": bomb} for bomb in BOMBS], rng)
    return {
        "rounds": rounds,
        "gaps": {kind: len(gap) for kind, gap in gaps.items()},
        "gap_ms": {
            kind: {f"p{percent}": 1000 * percentile(gap, percent) for percent in (50, 90, 99, 99.9)}
            | {"max": 1000 * max(gap)}
            for kind, gap in gaps.items()
        },
    }


async def crowd(askers: Sequence[Asker], outputs: dict[str, Any] | None, rng: Random) -> dict[str, Any]:
    """The worst gap of the first tenant's streams, which go on until each request of the second has ended."""
    first, second = askers
    body = {"prompt": [5] * 20, "max_tokens": CROWD_TOKENS, "n": CROWD_N, "structured_outputs": outputs}
    began_s = time.perf_counter()
    ended = asyncio.Event()

    async def stream() -> list[float]:
        gaps: list[float] = []
        while not ended.is_set():
            gaps += await first.gaps_s([rng.randrange(100, 800) for _ in range(64)])
        return gaps

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    await asyncio.sleep(0.5)
    replies: list[httpx.Response] = []
    if outputs is not None:
        replies = await asyncio.gather(*[second.whole(body) for _ in range(CROWD_REQUESTS)])
    seconds = time.perf_counter() - began_s
    ended.set()
    gaps = [gap for some in streams for gap in await some]
    refused = next((reply.json()["error"]["message"] for reply in replies if reply.status_code != 200), None)
    return {
        "worst_gap_ms": 1000 * max(gaps),
        "p99_ms": 1000 * percentile(gaps, 99),
        "seconds": seconds,
        "statuses": sorted({reply.status_code for reply in replies}),
        "refused": refused,
    }


async def crowds(askers: Sequence[Asker], rounds: int, rng: Random) -> dict[str, Any]:
    """The measurement with the median of the worst gaps, of each crowd."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CROWDS}
    for _ in range(rounds):
        for name, outputs in CROWDS.items():
            found[name].append(await crowd(askers, outputs, rng))
            print(name, json.dumps(found[name][-1]), flush=True)
    return {
        name: sorted(some, key=lambda run: run["worst_gap_ms"])[rounds // 2] for name, some in found.items()
    }


async def measure(url: str, keys: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    rng = Random(options.seed)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        askers = [Asker(client, key) for key in keys]
        await prefixes(askers, 3, rng)  # everything has been imported and compiled then
        return {
            "prefixes": await prefixes(askers, options.rounds, rng) if options.rounds else None,
            "bombs": await bombs(askers, options.bomb_rounds, rng) if options.bomb_rounds else None,
            "crowds": await crowds(askers, options.crowd_rounds, rng) if options.crowd_rounds else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.strangers")
    parser.add_argument("--rounds", type=int, default=300, help="prompts of each kind")
    parser.add_argument("--bomb-rounds", type=int, default=5)
    parser.add_argument("--crowd-rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    keys = [secrets.token_hex(16) for _ in TENANTS]
    with tempfile.TemporaryDirectory() as folder:
        known = [
            {"tenant": tenant, "sha256": sha256(key.encode()).hexdigest()}
            for tenant, key in zip(TENANTS, keys, strict=True)
        ]
        (Path(folder) / "keys.yaml").write_text(yaml.safe_dump({"keys": known}))
        server = Server(
            [
                "keeper",
                "--port",
                "0",
                "--prefill",
                "1",
                "--decode",
                "1",
                "--memory",
                "256MiB",
                "--api-keys-file",
                f"{folder}/keys.yaml",
            ],
            Path(folder) / "log",
        )
        try:
            found = asyncio.run(measure(server.url, keys, options))
        finally:
            server.stop()
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    worst_ms: dict[str, float] = {
        name: some["worst_gap_ms"] for name, some in (found["crowds"] or {}).items()
    }
    verdicts = {
        name: gap_verdict(ms - worst_ms["no grammar"], worst_ms["no grammar"], CROWD_GAP_MS_MAX)
        for name, ms in worst_ms.items()
    }
    for name, verdict in verdicts.items():
        print(f"{name:36} {worst_ms[name]:8.0f} ms {verdict}")
    sys.exit(STATUSES[worst([*verdicts.values()])])


if __name__ == "__main__":
    main()
