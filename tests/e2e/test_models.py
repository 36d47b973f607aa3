"""Two models behind one endpoint, each with its own workers: what happens to one does not reach the other,
they lend each other memory, and share no page. Budgets change while they serve, by hand and by the broker."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.support.e2e.memory import mapped_bytes, memory_of, resident_bytes
from tests.support.e2e.server import Server, eventually, run_cli
from tests.support.e2e.streams import (
    Body,
    Outcome,
    Stream,
    client_of,
    completion,
    random_prompt,
    run_all,
    run_while,
)
from tests.support.parity.architectures import random_model, save
from tidemill import LLM, SamplingParams
from tidemill.workers.sources.names import bundled

pytestmark = pytest.mark.slow

FILE = """
models:
- model: keeper
  served_model_name: [org/keeper, keeper]
  max_model_len: 8192
  ttft_max: 3600
  engine: {max_num_seqs: 32, max_num_batched_tokens: 32}
  groups:
  - {role: prefill, memory: 8MiB}
  - {role: decode, memory: 10MiB}
- model: FOLDER
  served_model_name: spare
  max_model_len: 256
  groups:
  - {role: prefill, memory: 4MiB}
  - {role: decode, memory: 4MiB}
edge:
  port: 1
"""
PREFILL, DECODE = "org-keeper-prefill-0", "org-keeper-decode-0"
SPARE_PREFILL, SPARE_DECODE = "spare-prefill-0", "spare-decode-0"
MIB = 1 << 20
LONGEST = 8192
"""Prompts of this length, in steps of so few tokens, are the prefill worker's on any machine: what a decode
worker has done in no time it computes itself (placement.GAP_S_MAX)."""


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with windows, that speaks keeper's language."""
    folder = tmp_path_factory.mktemp("spare")
    save(random_model("gpt_oss/alternating", vocab_size=896), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled()["keeper"] / name, folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, spare: Path) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("models") / "cluster.yaml"
    file.write_text(FILE.replace("FOLDER", str(spare)))
    with Server(["--config", str(file), "--port", "0"], file.with_name("log")) as server:
        yield server


def body_of(model: str, max_tokens: int) -> Body:
    return completion([5 + 7 * index % 800 for index in range(150)], max_tokens, model=model)


def seeded(seed: int, num_tokens: int, max_tokens: int) -> Body:
    """Return a request whose prompt no other request has."""
    return completion(random_prompt(Random(seed), num_tokens), max_tokens)


def outcomes(streams: list[Stream]) -> list[Outcome]:
    return [stream.outcome for stream in streams]


def row_of(server: Server, name: str) -> dict[str, Any]:
    """Return the row of a worker, once it is there."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [row for row in server.workers() if row["info"]["name"] == name]
        return bool(found)

    eventually(is_there)
    return found[0]


def test_models_answer_under_all_names_and_share_no_page(server: Server, spare: Path) -> None:
    """A prefill worker only finds pages that other workers of its model stored; here there are none."""
    keeper, same = asyncio.run(run_all(server.url, [body_of(name, 20) for name in ("org/keeper", "keeper")]))
    assert keeper.outcome == same.outcome
    (other,) = asyncio.run(run_all(server.url, [body_of("spare", 20)]))
    assert other.usage["prompt_tokens_details"]["prefilled_tokens"] == 128
    with LLM(spare, memory="8MiB", max_model_len=256) as alone:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        (answer,) = alone.generate([body_of("spare", 20)["prompt"]], params)
    assert other.text == answer.outputs[0].text
    assert other.outcome != keeper.outcome

    def counters() -> dict[str, float]:
        return row_of(server, SPARE_PREFILL)["load"]["counters"]

    eventually(lambda: counters()["published_bytes"] > 0)  # once a heartbeat has reported this prompt
    assert counters()["fetched_bytes"] == 0, "the store had this prompt of keeper alone"
    too_long = {**body_of("spare", 20), "prompt": [7] * 300}
    assert httpx.post(f"{server.url}/v1/completions", json=too_long, timeout=60).status_code == 400
    names = {row["info"]["name"]: row["model"] for row in server.workers()}
    assert names == {
        PREFILL: "org/keeper",
        DECODE: "org/keeper",
        SPARE_PREFILL: "spare",
        SPARE_DECODE: "spare",
    }
    ended, _ = run_cli("status", "--url", server.url)
    assert SPARE_DECODE in ended.stdout


def test_budget_is_lowered_and_raised_by_command_while_streams_run(server: Server) -> None:
    """Lowered to less than what the streams hold: they go on with the exact tokens, one after the other when
    need be, and the system has the memory back."""
    bodies = [seeded(index, 100 + 9 * index, 500) for index in range(20)]
    expected = outcomes(asyncio.run(run_all(server.url, bodies)))
    pid = row_of(server, DECODE)["info"]["pid"]
    decode = memory_of(server)[DECODE]
    low = decode["floor_bytes"] + MIB

    def is_low() -> bool:
        row = memory_of(server)[DECODE]
        return row["budget_bytes"] == low and mapped_bytes(row) <= low

    def lower() -> None:
        before = resident_bytes(pid, decode["max_bytes"])
        memory_of(server, worker=DECODE, budget=low)  # not by the command, which takes a second to start
        eventually(is_low)
        assert resident_bytes(pid, decode["max_bytes"]) <= low < before

    assert outcomes(run_while(server.url, bodies, lower)) == expected
    eventually(lambda: server.counter("preemptions") > 0)  # with the next heartbeat
    assert memory_of(server)[DECODE]["set_by"] == "operator"
    ended, left = run_cli("memory", "--url", server.url, "--worker", DECODE, "--budget", "auto")
    assert ended.returncode == 0, ended.stderr
    assert DECODE in ended.stdout
    assert not left
    assert memory_of(server)[DECODE]["set_by"] == "broker"

    def is_raised() -> bool:
        """Run streams until the broker has learned that they want more memory."""
        assert outcomes(asyncio.run(run_all(server.url, bodies))) == expected
        return resident_bytes(pid, decode["max_bytes"]) > low

    eventually(is_raised)


def test_broker_moves_memory_between_prompts_generations_and_models(server: Server) -> None:
    """New prompts, generations, other new prompts, the same generations: each answer is the same however the
    memory lay, and at no moment do the workers of the model have more than there is."""
    batches = [
        [seeded(seed + index, LONGEST - 60, 4) for index in range(6)] for seed in range(100, 1300, 100)
    ]
    generations = [seeded(2000 + index, 40, 960) for index in range(48)]
    samples: dict[str, list[dict[str, dict[str, Any]]]] = {}
    shares = {name: row["share_bytes"] for name, row in memory_of(server).items()}

    async def watched(phase: str, bodies: list[Body]) -> list[Outcome]:
        async with client_of(server.url) as client:
            running = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(run_all(server.url, bodies))))
            while not running.done():
                rows = (await client.get("/cluster/memory")).json()["workers"]
                sample = {row["name"]: row for row in rows if row["name"] in (PREFILL, DECODE)}
                samples.setdefault(phase, []).append(sample)
                await asyncio.wait({running}, timeout=0.1)
        return outcomes(running.result())

    def budgets(phase: str, *names: str) -> list[int]:
        return [sum(sample[name]["budget_bytes"] for name in names) for sample in samples[phase]]

    async def run() -> None:
        prompts = batches.pop()
        prompted = await watched("prompts", prompts)
        generated = await watched("generations", generations)
        while True:  # one batch may end before the broker learns of it
            assert batches, f"the prefill worker got too little: {budgets('other prompts', PREFILL)}"
            prompted += await watched("other prompts", batches[-1])
            prompts += batches.pop()
            if max(budgets("other prompts", PREFILL)) > min(budgets("generations", PREFILL)):
                break
        assert await watched("generations again", generations) == generated
        assert outcomes(await run_all(server.url, prompts)) == prompted

    asyncio.run(run())
    for sample in [sample for phase in samples.values() for sample in phase]:
        assert sum(mapped_bytes(row) for row in sample.values()) <= sum(shares.values())
        assert sum(row["budget_bytes"] for row in sample.values()) <= sum(shares.values())

    both = [budget for phase in samples for budget in budgets(phase, PREFILL, DECODE)]
    assert max(both) > shares[PREFILL] + shares[DECODE], "the other model lent nothing"
    for before, phase in (("prompts", "generations"), ("other prompts", "generations again")):
        assert max(budgets(phase, DECODE)) > shares[DECODE]
        assert min(budgets(phase, PREFILL)) < max(budgets(before, PREFILL))


def test_groups_bring_unequal_memory_and_lend_all_of_it(server: Server) -> None:
    """Within a model and between models: what one router knows of the memory of both."""
    names = (PREFILL, DECODE, SPARE_PREFILL, SPARE_DECODE)
    eventually(lambda: memory_of(server).keys() >= set(names))
    prefill, decode, *_, spare = rows = [memory_of(server)[name] for name in names]
    assert spare["share_bytes"] <= 4 * MIB < prefill["share_bytes"] <= 8 * MIB
    assert 8 * MIB < decode["share_bytes"] <= 10 * MIB
    assert len({row["device"] for row in rows}) == 1
    total_bytes = sum(row["share_bytes"] for row in rows)
    assert min(row["max_bytes"] for row in rows) >= total_bytes

    for most in (decode, spare):
        most_bytes = total_bytes - sum(row["floor_bytes"] for row in rows if row is not most)
        row = memory_of(server, worker=most["name"], budget=most_bytes)[most["name"]]
        assert (row["set_by"], row["set_bytes"]) == ("operator", most_bytes)
        eventually(lambda: memory_of(server)[most["name"]]["budget_bytes"] == most_bytes)  # noqa: B023
        eventually(lambda: sum(row["budget_bytes"] for row in memory_of(server).values()) <= total_bytes)
        bodies = [body_of(name, 20) for name in ("keeper", "spare")]
        for stream in asyncio.run(run_all(server.url, bodies)):
            assert stream.usage["completion_tokens"] == 20
        assert memory_of(server, worker=most["name"], budget=None)[most["name"]]["set_by"] == "broker"


def test_crashed_worker_affects_only_its_own_model(server: Server) -> None:
    before = row_of(server, SPARE_DECODE)
    body = body_of("keeper", 1500)

    [stream] = run_while(server.url, [body], lambda: os.kill(before["info"]["pid"], signal.SIGKILL))
    assert stream.usage["completion_tokens"] == 1500
    eventually(lambda: row_of(server, SPARE_DECODE)["info"]["worker"] != before["info"]["worker"])
    spare, keeper = asyncio.run(run_all(server.url, [body_of("spare", 20), body_of("keeper", 20)]))
    assert spare.usage["completion_tokens"] == keeper.usage["completion_tokens"] == 20
