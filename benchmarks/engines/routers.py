"""Two vLLMs that others run, behind other routers and behind ours: first tokens, and streams amid a kill."""

import asyncio
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any, NamedTuple

import httpx
import psutil
from tests.support.e2e.engine_streams import CLIENT_S_MAX, STREAMS, asks, longest_pause_s, text_of
from tests.support.e2e.history import Call
from tests.support.sockets import free_port

from benchmarks.engines.scene import NAME, Figure, Running, Scene, send
from benchmarks.peers.servers import started
from tidemill.cluster.bench.client import WORDS
from tidemill.cluster.bench.workloads import Item
from tidemill.workers.vllm.metrics import Metrics

OURS, VLLM, SGLANG = "Tidemill", "vllm-router", "sglang-router"
ROUNDS = 4
SERVERS = 2
MEMORY_BYTES = 328 << 20
"""The memory of a vLLM here: 27,989 tokens, less than all system prompts take."""
BLOCK_TOKENS = 128  # of vLLM on CPUs

SYSTEMS = 16
SYSTEM_WORDS = 2048
CONVERSATIONS, TURNS = 24, 3
QUESTION_WORDS, ANSWER_TOKENS = 32, 16
AT_A_TIME = 6


class Front(NamedTuple):
    """A router with its policy."""

    program: str
    policy: str = ""

    def __str__(self) -> str:
        return f"{self.program}, {self.policy}" if self.policy else self.program


ROUND_ROBIN = Front(VLLM, "round_robin")
BEST = [Front(VLLM, policy) for policy in ("cache_aware", "kv_aware", "consistent_hash")]
FRONTS = (ROUND_ROBIN, *BEST, Front(SGLANG, "cache_aware"), Front(OURS))
KILLED = (Front(VLLM, "cache_aware"), Front(SGLANG, "cache_aware"), Front(OURS))


def behind_routers(scene: Scene) -> Iterator[Figure]:
    """Yield figures of the routers in front of the same two vLLMs."""
    flags = ("--enable-scale-out", "--scheduling-policy", "priority")
    flags += ("--kv-cache-memory-bytes", str(MEMORY_BYTES), "--kv-events-config")
    with ExitStack() as stack:

        def start() -> Running:
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{free_port()}"}
            return stack.enter_context(scene.vllm(*flags, json.dumps({**events, "publisher": "zmq"})))

        servers = [start() for _ in range(SERVERS)]
        yield from first_tokens(scene, servers)
        for front in KILLED:
            with fronted(scene, front, servers) as url:
                yield kill(front, url, servers.pop(0).root)
            if front is not KILLED[-1]:
                servers.append(start())


def first_tokens(scene: Scene, servers: Sequence[Running]) -> Iterator[Figure]:
    """Yield the mean time to the first token behind each router, which get the same conversations in turn,
    in the opposite order every second time. Each begins with empty caches."""
    times_s: dict[Front, list[float]] = {front: [] for front in FRONTS}
    shares: dict[Front, list[float]] = {front: [] for front in FRONTS}
    for number in range(ROUNDS):
        items = conversations(Random(number))
        for front in FRONTS[:: -1 if number % 2 else 1]:
            for server in servers:
                httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
            with fronted(scene, front, servers) as url:
                before = _cached(servers)
                results = send(url, items, AT_A_TIME).results
                found, asked = (now - then for now, then in zip(_cached(servers), before, strict=True))
            times_s[front] += [result.ttft_s for result in results]
            shares[front].append(found / asked)
    means_s = {front: mean(times) for front, times in times_s.items()}
    for front, mean_s in means_s.items():
        p90_s = sorted(times_s[front])[len(times_s[front]) * 9 // 10]
        details = f"p90 {p90_s:.2f} s, {mean(shares[front]):.0%} of prompt tokens cached"
        yield Figure(f"mean first token behind {front}, s", mean_s, None, details)
    ours_s = means_s[Front(OURS)]
    yield Figure("mean first token by that of round-robin", ours_s / means_s[ROUND_ROBIN], 0.7)
    best = min(BEST, key=means_s.__getitem__)
    yield Figure(
        "mean first token by that of vllm-router's best policy", ours_s / means_s[best], 0.95, best.policy
    )


def conversations(rng: Random, systems: Sequence[str] = ()) -> tuple[Item, ...]:
    """Return conversations with assistants, as texts: some routers take no tokens, others find no prefix in
    them. The system prompt of the n-th assistant has a share that is proportional to n ** -0.5."""
    systems = systems or [_text(rng, SYSTEM_WORDS) for _ in range(SYSTEMS)]
    items: list[Item] = []
    for group in range(CONVERSATIONS):
        [text] = rng.choices(systems, [rank**-0.5 for rank in range(1, len(systems) + 1)])
        for turn in range(TURNS):
            text += _text(rng, QUESTION_WORDS)
            items.append(
                Item(
                    text=text,
                    max_tokens=ANSWER_TOKENS,
                    group=group,
                    position=turn,
                    shared_tokens=0,
                    after=len(items) - 1 if turn else None,
                    hints={"user": f"user-{group}"},
                )
            )
            text += _text(rng, ANSWER_TOKENS)
    return tuple(items)


def _text(rng: Random, words: int) -> str:
    return "".join(f" {word}" for word in rng.choices(WORDS, k=words))


def _cached(servers: Sequence[Running]) -> tuple[float, float]:
    """Return the prompt tokens that the servers found in their caches, and those that they looked for."""
    values = [Metrics.parse(httpx.get(f"{server.url}/metrics").content).values for server in servers]
    hits, queries = (
        sum(each.get(f"prefix_cache_{name}_total", 0.0) for each in values) for name in ("hits", "queries")
    )
    return hits, queries


@contextmanager
def fronted(scene: Scene, front: Front, servers: Sequence[Running]) -> Generator[str]:
    """Run a router in front of the servers, and yield its URL."""
    urls = [server.url for server in servers]
    if front.program == OURS:
        with scene.serving("--engine", f"vllm={','.join(urls)}") as ours:
            yield ours.url
        return
    assert scene.routers is not None
    port = str(free_port())
    command = [str(scene.routers.parent / front.program), *(["launch"] if front.program == SGLANG else [])]
    command += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", str(free_port())]
    command += ["--policy", front.policy, "--worker-startup-check-interval", "1", "--worker-urls", *urls]
    if front.policy == "kv_aware":
        command += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", NAME]
        for url in urls:
            [source] = httpx.get(f"{url}/kv_event_sources").json().values()
            command += ["--kv-event-source", f"{url}={source['endpoint'].replace('*', '127.0.0.1')}"]
    url = f"http://127.0.0.1:{port}"
    with started(command, {}, url, scene.folder / f"{front.program}.log"):
        send(url, conversations(Random(url), systems=[""])[:8], AT_A_TIME)
        yield url


class Stream(Call):
    """A stream behind a router that may drop the running usage: then each chunk is a token."""

    def _take(self, data: dict[str, Any]) -> None:
        super()._take(data | {"usage": data.get("usage") or {"completion_tokens": len(self.chunks) + 1}})


def kill(front: Front, url: str, victim: psutil.Process) -> Figure:
    """Return how many of 8 streams are cut when a vLLM is killed with all its processes."""
    calm, calls = asyncio.run(_streams(url)), asyncio.run(_streams(url, victim))
    whole = [call for call in calls if not call.trouble]
    equal = sum(text_of(call) == text_of(other) for call, other in zip(calls, calm, strict=True))
    pause = f", longest pause {longest_pause_s(whole):.2f} s" if whole else ""
    return Figure(
        f"of {STREAMS} streams behind {front}, cut by a kill of one vLLM",
        STREAMS - len(whole),
        0 if front.program == OURS else None,
        f"{equal} answers equal those without a kill{pause}",
    )


async def _streams(url: str, victim: psutil.Process | None = None) -> list[Stream]:
    async with httpx.AsyncClient(base_url=url, timeout=CLIENT_S_MAX, trust_env=False) as client:
        calls = [
            Stream(replace(ask, body={**ask.body, "prompt": _text(Random(index), QUESTION_WORDS)}))
            for index, ask in enumerate(asks(NAME))
        ]
        running = [asyncio.create_task(call.run(client, salt="streams")) for call in calls]
        if victim is not None:
            for call in calls:
                await call.reach(4)
            for process in (*victim.children(recursive=True), victim):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        await asyncio.gather(*running)
    return calls
