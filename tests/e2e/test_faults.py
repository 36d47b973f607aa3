"""A server with Mooncake of its own: right answers, also through the death of each process of the store; then
every kind of process killed and stopped under load: each call as if nothing had happened, nothing kept.

What tests/e2e/test_group.py and test_serving.py kill is left out here.
`FAULT_RUNS=50 FAULT_RANKS=2 pytest tests/e2e/test_faults.py -k storm` is a soak; `FAULT_SEED` replays one.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.support.e2e.altered import LEAKS, POISON
from tests.support.e2e.faults import (
    MASTER,
    OWNER,
    RANK,
    ROUTER,
    Fault,
    Run,
    holds,
    process_of,
    rows_of,
    run,
    run_until,
    storm,
    wait_until_quiet,
)
from tests.support.e2e.history import Ask, Call, Chunk, asks, broken, pauses_s, percentile
from tests.support.e2e.machine import check_during
from tests.support.e2e.server import Server, eventually, listening_of, run_cli
from tests.support.e2e.streams import (
    Body,
    Outcome,
    client_of,
    completion,
    outcomes_of,
    random_prompt,
    run_all,
    run_while,
)
from tidemill.workers.sources.names import bundled

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("FAULT_SEED", "0"))
RUNS = int(os.environ.get("FAULT_RUNS", "1"))
RANKS = int(os.environ.get("FAULT_RANKS", "1"))
WORKERS = frozenset(("prefill-0", "decode-0", "decode-1"))
NAMES = (*sorted(WORKERS), MASTER, OWNER, ROUTER) + ((RANK,) if RANKS > 1 else ())
ROLES = ("--prefill", "1", "--decode", "2", "--decode-tensor-parallel-size", str(RANKS))
WIDTH = 8
KEEPER = bundled()["keeper"]


class Prompts:
    """Greedy completions of new prompts."""

    def __init__(self) -> None:
        self._rng = Random(5)

    def bodies(self, count: int, num_tokens: int, max_tokens: int) -> list[Body]:
        return [completion(random_prompt(self._rng, num_tokens), max_tokens) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """It stops with the master and the owner: no process is left."""
    (folder / "secret").write_text(f"{bytes(range(32)).hex()}\n")
    (folder / "secret").chmod(0o600)
    store = ("--store", "mooncake?size=256MiB&timeout=1s&ports=open")
    secret = ("--store-secret-file", str(folder / "secret"))
    options = ("keeper", "--port", "0", *ROLES, "--memory", "64MiB", *store, *secret)
    with Server(options, folder / "log", "tests.support.e2e.altered") as server:
        yield server


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture(scope="module")
def asked() -> list[Ask]:
    return asks(Random(6), 12, num_tokens=300, max_tokens=240)


def salt_of(*parts: object) -> str:
    return "-".join(re.findall("[A-Za-z0-9]+", str(parts)))


def check(server: Server, found: Run, calm: Sequence[Call], title: str) -> None:
    """Every call as in the calm, and nothing kept."""
    pairs = zip(found.calls, cycle(calm), strict=False)
    assert {number: one for number, pair in enumerate(pairs) if (one := broken(*pair))} == {}, title
    wait_until_quiet(server, WORKERS)
    for struck in found.struck:
        pauses = pauses_s(found.calls, struck.at_s)
        line = f"{struck.fault} dropped after {struck.missed_s} s"
        if pauses:
            line += f", pauses of {len(pauses)} streams: p50 {percentile(pauses, 50):.2f} s"
            line += f", p99 {percentile(pauses, 99):.2f} s"
        sys.stdout.write(f"{title}: {line}\n")


def outcomes(server: Server, bodies: list[Body]) -> list[Outcome]:
    return outcomes_of(server.url, bodies)


def is_left_alone(server: Server) -> bool:
    """Return whether a worker has reported that the store is down."""
    return any(row["load"]["counters"]["store_is_down"] for row in server.workers())


def reasons(server: Server) -> set[str]:
    """Return why tokens of the latest prompts were computed."""
    rows = httpx.get(f"{server.url}/cluster/requests", timeout=300).json()["requests"]
    prompts = chain.from_iterable(row["cache_diagnostics"] for row in rows)
    return {miss["reason"] for prompt in prompts for miss in prompt["misses"]}


def wait_until_used(server: Server, prompts: Prompts) -> None:
    """Wait until a decode worker gets from the store what the prefill worker has just put there. Of that
    many prompts, a decode worker that is faster than fetches does not compute all itself."""
    hits = server.counter("store_gets_as_hit")

    def is_used() -> bool:
        outcomes(server, prompts.bodies(32, 200, 2))
        return server.counter("store_gets_as_hit") > hits  # as of the last heartbeat

    eventually(is_used)


def test_mooncake_master_listens_on_loopback_only(server: Server) -> None:
    listening = listening_of([process_of(server, MASTER)])
    assert len(listening) >= 2
    assert set(listening) == {"127.0.0.1"}


def test_operators_see_the_content_of_the_store(
    server: Server, folder: Path, prompts: Prompts, tmp_path: Path
) -> None:
    wait_until_used(server, prompts)
    found = re.search(r"store: (mooncake://\S+)", (folder / "log").read_text())
    assert found is not None
    store = ("--store", found[1], "--store-secret-file")
    ended, left = run_cli("store", "ls", "--json", *store, str(folder / "secret"))
    assert (ended.returncode, left) == (0, []), ended.stderr
    held = json.loads(ended.stdout)
    assert {entry["kind"] for entry in held} == {"page", "checkpoint"}
    get = ("store", "get", held[0]["key"], "-o", str(tmp_path / "body"), *store)
    ended, _ = run_cli(*get, str(folder / "secret"))
    assert ended.stdout.startswith("hit: "), ended.stderr
    assert (tmp_path / "body").stat().st_size > 0
    (tmp_path / "other").write_bytes(bytes(32))
    ended, _ = run_cli(*get, str(tmp_path / "other"))
    assert (ended.returncode, ended.stdout) == (1, "corrupt\n"), "sealed with the secret of the server"
    metrics = httpx.get(f"{server.url}/metrics", timeout=300).text
    labels = 'model_name="keeper",outcome="hit",role="decode",worker="decode-0"'
    assert f"tidemill:worker_store_gets_total{{{labels}}}" in metrics


def test_pages_survive_the_loss_of_every_worker(server: Server, prompts: Prompts) -> None:
    """kill -9 of all workers: what they have computed is with the owner, and is fetched from there."""
    bodies = prompts.bodies(4, 300, 20)
    expected = outcomes(server, bodies)
    fetched: set[int] = set()

    def are_fetched() -> bool:
        """Some pages may have been on their way to the owner, or too late to be waited for."""
        server.replace_workers()
        streams = asyncio.run(run_all(server.url, bodies))
        assert [stream.outcome for stream in streams] == expected
        cached = [stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in streams]
        fetched.update(index for index, num_tokens in enumerate(cached) if num_tokens == 256)
        return len(fetched) == len(bodies)

    eventually(are_fetched)
    eventually(lambda: server.counter("store_gets_as_hit") > 0)


@pytest.mark.parametrize("part", [MASTER, OWNER])
def test_streams_survive_the_loss_of_the_store(server: Server, prompts: Prompts, part: str) -> None:
    """kill -9 of the master, or of the owner with all pages, while eight streams run: each ends with the
    exact tokens, and the store that comes back is used."""
    bodies = prompts.bodies(8, 150, 300)
    expected = outcomes(server, bodies)
    killed = process_of(server, part)
    streams = run_while(server.url, bodies, killed.kill)
    assert [stream.outcome for stream in streams] == expected
    assert process_of(server, part).pid != killed.pid
    wait_until_used(server, prompts)


def test_requests_are_computed_while_the_store_is_down(server: Server, prompts: Prompts) -> None:
    """A master that is frozen: calls to it hang. It is found down, the workers leave it alone and compute; it
    is used again by itself, with all that it knew."""
    known, new = prompts.bodies(4, 300, 20), prompts.bodies(4, 300, 20)
    expected = outcomes(server, known)
    master = process_of(server, MASTER)
    master.suspend()
    try:
        away = outcomes(server, new)
        eventually(lambda: bool(outcomes(server, prompts.bodies(1, 200, 2))) and is_left_alone(server))
        hits = server.counter("store_gets_as_hit")
        assert outcomes(server, known) == expected
        assert server.counter("store_gets_as_hit") == hits
        assert "store_down" in reasons(server), "a decode worker computed what it could not fetch"
    finally:
        master.resume()
    wait_until_used(server, prompts)
    assert outcomes(server, new) == away
    eventually(lambda: not is_left_alone(server))
    assert process_of(server, MASTER).pid == master.pid


@pytest.mark.parametrize("fault", [Fault(ROUTER, 2.0), Fault("decode-0", 6.0), Fault(OWNER, 4.0)], ids=str)
def test_streams_are_unchanged_by_faults(
    server: Server, asked: list[Ask], calm: list[Call], fault: Fault
) -> None:
    """All streams are under way. A worker that stands still is dropped, and found again as it was."""
    before = server.lives()
    found = asyncio.run(
        run(server, asked, salt_of("streams", fault), [replace(fault, call=0, num_tokens=20)])
    )
    assert not found.late, "too late: make the streams longer"
    assert fault.name not in WORKERS or found.struck[0].missed_s is not None, "it was never dropped"
    check(server, found, calm, "streams")
    assert server.lives() == before


@pytest.mark.parametrize("fault", [Fault("prefill-0"), Fault("prefill-0", 4.0), Fault(ROUTER)], ids=str)
def test_prompts_are_unchanged_by_faults(server: Server, fault: Fault) -> None:
    """Faults while prompts are computed and more arrive."""
    short = asks(Random(7), 12, num_tokens=1200, max_tokens=12)
    short = [replace(ask, body={**ask.body, "max_tokens": 12}) for ask in short]
    calm = asyncio.run(run(server, short, "calm", width=WIDTH)).calls
    found = asyncio.run(
        run(server, short, salt_of("prompts", fault), [replace(fault, after_s=0.1)], width=WIDTH)
    )
    struck_s = found.struck[0].at_s
    assert any(not call.chunks or call.chunks[0].at_s > struck_s for call in found.calls), "too late"
    check(server, found, calm, "prompts")


@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_streams_are_unchanged_by_a_storm_of_faults(server: Server, seed: int) -> None:
    """Random faults at random steps of the load."""
    rng = Random(seed)
    wanted = asks(rng, 20, num_tokens=250, max_tokens=160)
    calm = asyncio.run(run(server, wanted, f"calm-{seed}", width=WIDTH)).calls
    faults = storm(rng, NAMES, 4, len(wanted), 60)
    found = asyncio.run(run(server, wanted, f"storm-{seed}", faults, width=WIDTH))
    assert found.struck
    check(server, found, calm, f"storm {seed}")


def test_rolling_restart_under_load_changes_no_answer(
    server: Server, asked: list[Ask], calm: list[Call]
) -> None:
    """Drained, killed when it is empty, and back: one worker after the other."""
    before = server.lives()

    def restart(name: str) -> None:
        body = {"drain": True, "force": name == "prefill-0"}  # the only one: the others compute prompts, too
        response = httpx.post(f"{server.url}/cluster/workers/{name}/drain", json=body, timeout=300)
        assert response.status_code == httpx.codes.OK, response.text

        def is_empty() -> bool:
            rows = [row for row in rows_of(server) or () if row["info"]["name"] == name]
            return [(row["state"], holds(row)) for row in rows] == [("draining", False)]

        eventually(is_empty)
        process_of(server, name).kill()
        eventually(lambda: server.lives().get(name, before[name]) != before[name])

    async def main() -> Run:
        done = asyncio.Event()
        load = asyncio.create_task(run_until(server, asked, "rolling", WIDTH, done))
        try:
            for name in ("decode-0", "prefill-0"):
                await asyncio.to_thread(restart, name)
        finally:
            done.set()
            found = await load
        return found

    check(server, asyncio.run(main()), calm, "rolling restart")


def test_poisonous_request_crashes_two_workers_and_ends_no_other_stream(
    server: Server, asked: list[Ask], calm: list[Call]
) -> None:
    """A prompt that kills its worker: tried again alone, blamed, and refused from then on."""
    prompt = [*asks(Random(8), 1, num_tokens=200, max_tokens=1)[0].body["prompt"], *POISON]
    poison = Ask("/v1/completions", {"model": "keeper", "prompt": prompt, "max_tokens": 8, "stream": True})

    async def main(salt: str) -> tuple[Run, Call]:
        running = asyncio.create_task(run(server, asked, salt))
        call = Call(poison)
        async with client_of(server.url) as client:
            await call.run(client, "poison")
        return await running, call

    for salt, num_dead in (("poison", 2), ("quarantine", 0)):
        before = server.lives()
        found, call = asyncio.run(main(salt))
        assert len(call.trouble) == 1
        assert call.trouble[0].startswith("status 500")
        assert '"poisonous"' in call.trouble[0]
        check(server, found, calm, salt)
        after = server.lives()
        assert sum(after[name] != before[name] for name in WORKERS) <= num_dead


def test_planted_leak_ends_its_worker(server: Server, prompts: Prompts) -> None:
    bodies = prompts.bodies(6, 200, 400)
    calm, before = outcomes(server, bodies), server.lives()

    async def cancelled() -> None:
        body = completion([7] * 20, 400, stream=True)
        async with (
            client_of(server.url) as client,
            client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": LEAKS}) as response,
        ):
            async for _ in response.aiter_lines():
                return

    def leak() -> None:
        asyncio.run(cancelled())
        eventually(lambda: "the owners of this worker's memory are wrong" in server.log())

    streams = run_while(server.url, bodies, leak)
    assert [stream.outcome for stream in streams] == calm
    eventually(lambda: len(server.lives().items() - before.items()) == 1)
    assert server.lives().keys() == WORKERS
    assert f"{LEAKS}." in server.log(), "the newest events"


def test_worker_hands_its_streams_over_after_sigterm(
    server: Server, asked: list[Ask], calm: list[Call]
) -> None:
    """The worker hands its streams over and does not come back, so this is the last test."""
    leaving = process_of(server, "decode-1")

    check_during(server, asked, calm, "leaving", leaving.terminate)
    eventually(lambda: server.lives().keys() == WORKERS - {"decode-1"} and not leaving.is_running())


def test_checker_finds_each_kind_of_difference() -> None:
    def chunk(token: str, total: int, finish: str | None = None) -> Chunk:
        offsets = (total - 1,)
        return Chunk(
            at_s=0, choice=0, text=token, tokens=(token,), offsets=offsets, finish=finish, total=total
        )

    def call(*chunks: Chunk, usage: int = 3, trouble: Sequence[str] = ()) -> Call:
        return Call(Ask("", {}), chunks=list(chunks), usage={"completion_tokens": usage}, trouble=[*trouble])

    a, b, c = chunk("a", 1), chunk("b", 2), chunk("c", 3, "length")
    calm = call(a, b, c)
    assert broken(calm, calm) == []
    for wrong in (
        call(a, b, c, trouble=["cut"]),
        call(a, b, c, usage=2),
        call(a, b, b, c),  # twice
        call(a, b, chunk("b", 3), chunk("c", 4, "length"), usage=4),  # one too many
        call(a, chunk("c", 2, "length"), usage=2),  # one too few
        call(a, chunk("x", 2), c),
        call(b, a, c),
        call(a, b, c, c),
        call(a, b, chunk("c", 3)),
        call(a, b, chunk("c", 3, "stop")),
        call(a, chunk("b", 2, "length"), c),
        call(),
    ):
        assert broken(wrong, calm)
