"""Budgets that change while real workers serve: by hand, and by the broker between prefill and decode."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, eventually, run_cli
from tests.e2e.streams import Stream, client_of, run_all

MIB = 1 << 20
SHARE = 8 * MIB
LONGEST = 8192
"""Prompts of this length are the prefill worker's on any machine: a decode worker that is fast enough
computes shorter ones itself (placement.GAP_S_MAX)."""

MAPPED = ("pages_live", "pages_cached", "states_live", "states_cached", "free", "empty")

Outcome = tuple[str, str | None, int]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One prefill and one decode worker with one memory."""
    arguments = ["--memory", "8MiB", "--max-model-len", str(LONGEST), "--max-num-seqs", "32"]
    server = Server(["keeper", "--port", "0", *arguments], tmp_path_factory.mktemp("memory") / "log")
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def body_of(seed: int, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    rng = Random(seed)
    return {
        "model": "keeper",
        "prompt": [rng.randrange(5, 890) for _ in range(num_tokens)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def memory_of(server: Server) -> dict[str, dict[str, Any]]:
    rows = httpx.get(f"{server.url}/cluster/memory", timeout=300).json()["workers"]
    return {row["name"]: row for row in rows}


def mapped_bytes(row: dict[str, Any]) -> int:
    return sum(row["memory"][name] for name in MAPPED)


def resident_bytes(pid: int, reserved_bytes: int) -> int:
    """Of the arena, as the kernel counts it. It is kept out of core dumps ("dd"), as little else is, so the
    kernel does not merge its mapping with what lies beside it."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    mapping = r"^Size: +(\d+) kB\n(?:\w+: .*\n)*?Rss: +(\d+) kB\n(?:\w+: .*\n)*?VmFlags: (.*)$"
    (resident,) = (
        int(resident) << 10
        for size, resident, flags in re.findall(mapping, text, re.MULTILINE)
        if "dd" in flags.split() and int(size) << 10 == reserved_bytes
    )
    return resident


def outcomes(streams: list[Stream]) -> list[Outcome]:
    return [stream.outcome for stream in streams]


def test_a_budget_is_lowered_and_raised_by_hand_while_streams_run(server: Server) -> None:
    """Lowered to less than what the streams hold: they go on with the exact tokens, one after the other
    when need be, and the system has the memory back."""
    bodies = [body_of(index, 100 + 9 * index, 800) for index in range(20)]
    expected = outcomes(asyncio.run(run_all(server.url, bodies)))
    (pid,) = (row["info"]["pid"] for row in server.workers("decode"))
    decode = memory_of(server)["decode-0"]
    low = decode["floor_bytes"] + MIB

    def lower() -> None:
        """At once, while the streams are young: the command takes a second to start."""
        body = {"worker": "decode-0", "budget": low}
        assert httpx.post(f"{server.url}/cluster/memory", json=body, timeout=300).status_code == 200

    def is_low() -> bool:
        row = memory_of(server)["decode-0"]
        return row["budget_bytes"] == low and mapped_bytes(row) <= low

    async def run() -> list[Stream]:
        streams = [Stream(body) for body in bodies]
        async with client_of(server.url) as client, asyncio.TaskGroup() as running:
            for stream in streams:
                running.create_task(stream.run(client))
            for stream in streams:
                await stream.under_way.wait()
            before = resident_bytes(pid, decode["max_bytes"])
            await asyncio.to_thread(lower)
            assert not any(stream.finish_reason for stream in streams), "too late: make the streams longer"
            await asyncio.to_thread(eventually, is_low)
            assert resident_bytes(pid, decode["max_bytes"]) <= low < before
        return streams

    assert outcomes(asyncio.run(run())) == expected
    eventually(lambda: server.counter("preemptions") > 0)  # the next heartbeat tells
    assert memory_of(server)["decode-0"]["set_by"] == "operator"
    ended, left = run_cli("memory", "--url", server.url, "--worker", "decode-0", "--budget", "auto")
    assert ended.returncode == 0, ended.stderr
    assert "decode-0" in ended.stdout
    assert not left
    eventually(lambda: memory_of(server)["decode-0"]["budget_bytes"] > low)
    assert memory_of(server)["decode-0"]["set_by"] == "broker"
    assert outcomes(asyncio.run(run_all(server.url, bodies))) == expected
    assert resident_bytes(pid, decode["max_bytes"]) > low


def test_the_broker_moves_memory_between_long_prompts_and_long_generations(server: Server) -> None:
    """New prompts, generations, other new prompts, the same generations: each answer is the same however the
    memory lay, and at no moment do both workers have more than there is."""
    batches = [
        [body_of(seed + index, LONGEST - 60, 4) for index in range(8)] for seed in range(100, 1300, 100)
    ]
    generations = [body_of(2000 + index, 40, 960) for index in range(24)]
    samples: dict[str, list[dict[str, dict[str, Any]]]] = {}

    async def watched(phase: str, bodies: list[dict[str, Any]]) -> list[Outcome]:
        async with client_of(server.url) as client:
            running = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(run_all(server.url, bodies))))
            while not running.done():
                rows = (await client.get("/cluster/memory")).json()["workers"]
                samples.setdefault(phase, []).append({row["name"]: row for row in rows})
                await asyncio.wait({running}, timeout=0.05)
        return outcomes(running.result())

    def budgets(phase: str, worker: str) -> list[int]:
        return [sample[worker]["budget_bytes"] for sample in samples[phase]]

    async def run() -> None:
        prompts = batches.pop()
        prompted = await watched("prompts", prompts)
        generated = await watched("generations", generations)
        while True:  # one batch may be over before the broker has heard of it
            assert batches, f"the prefill worker got nothing back: {budgets('other prompts', 'prefill-0')}"
            prompted += await watched("other prompts", batches[-1])
            prompts += batches.pop()
            if max(budgets("other prompts", "prefill-0")) > min(budgets("generations", "prefill-0")):
                break
        assert await watched("generations again", generations) == generated
        assert outcomes(await run_all(server.url, prompts)) == prompted

    asyncio.run(run())
    for sample in [sample for phase in samples.values() for sample in phase]:
        assert sum(mapped_bytes(row) for row in sample.values()) <= 2 * SHARE
        assert sum(row["budget_bytes"] for row in sample.values()) <= 2 * SHARE

    for phase in ("generations", "generations again"):  # they leave nothing to do for the prefill worker
        assert max(budgets(phase, "decode-0")) > SHARE > min(budgets(phase, "prefill-0"))
