"""A server with Mooncake of its own: right answers, also through the death of each process of the store."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from benchmarks.keeper.evaluate import exact_matches, load
from benchmarks.keeper.questions import questions

from tests.e2e.faults import MASTER, OWNER, process_of
from tests.e2e.server import Server, eventually, listening_of, run_cli
from tests.e2e.streams import client_of, run_all, run_while
from tidemill.workers.models.bundled import bundled

KEEPER = bundled()["keeper"]


class Prompts:
    """Greedy completions of prompts that nobody has seen before."""

    def __init__(self) -> None:
        self._rng = Random(5)

    def bodies(self, count: int, num_tokens: int, max_tokens: int) -> list[dict[str, Any]]:
        return [
            {
                "model": "keeper",
                "prompt": [self._rng.randrange(5, 890) for _ in range(num_tokens)],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for _ in range(count)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "secret").write_text(f"{bytes(range(32)).hex()}\n")
    (folder / "secret").chmod(0o600)
    options = ["--store", "mooncake?size=256MiB&timeout=1s", "--store-secret-file", str(folder / "secret")]
    server = Server(["keeper", "--port", "0", "--memory", "64MiB", *options], folder / "log")
    try:
        yield server
        assert server.stop() == 0  # with the master and the owner: no process is left
    finally:
        server.kill_everything()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts()


def outcomes(server: Server, bodies: list[dict[str, Any]]) -> list[tuple[str, str | None, int]]:
    return [stream.outcome for stream in asyncio.run(run_all(server.url, bodies))]


def is_left_alone(server: Server) -> bool:
    """Whether a worker has found the store down, as far as it has told."""
    return any(row["load"]["counters"]["store_is_down"] for row in server.workers())


def wait_until_used(server: Server, prompts: Prompts) -> None:
    """Until a decode worker gets from the store what the prefill worker has just put there: of several
    prompts at once, a decode worker that is the faster one does not compute all itself."""
    hits = server.counter("store_gets_as_hit")

    def is_used() -> bool:
        outcomes(server, prompts.bodies(8, 200, 2))
        return server.counter("store_gets_as_hit") > hits  # what the last heartbeat said

    eventually(is_used)


def test_answers_are_those_of_transformers(server: Server) -> None:
    """As they are with a folder: see test_serving.py."""
    asked = questions(40, context_tokens=512, seed=12)
    offline = exact_matches(*load(KEEPER), asked)["intact"]

    async def ask() -> list[bool]:
        async with client_of(server.url) as client:

            async def answer(messages: list[Any], expected: str) -> bool:
                body = {"model": "keeper", "messages": messages, "temperature": 0, "max_tokens": 40}
                response = await client.post("/v1/chat/completions", json=body)
                return response.json()["choices"][0]["message"]["content"].strip() == expected

            return await asyncio.gather(*(answer(list(one.messages), one.answer) for one in asked))

    assert asyncio.run(ask()) == offline
    eventually(lambda: server.counter("store_gets_as_hit") > 0)
    assert server.counter("store_puts_as_stored") > 0


def test_the_master_listens_on_loopback_alone(server: Server) -> None:
    listening = listening_of([process_of(server, MASTER)])
    assert len(listening) >= 2
    assert set(listening) == {"127.0.0.1"}


def test_operators_see_what_is_in_it(server: Server, folder: Path, tmp_path: Path) -> None:
    found = re.search(r"store: (mooncake://\S+)", (folder / "log").read_text())
    assert found is not None
    store = ("--store", found[1], "--store-secret-file")
    ended, left = run_cli("store", "ls", "--json", *store, str(folder / "secret"))
    assert (ended.returncode, left) == (0, []), ended.stderr
    held = json.loads(ended.stdout)
    assert {one["kind"] for one in held} == {"page", "checkpoint"}
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


def test_pages_survive_every_worker(server: Server, prompts: Prompts) -> None:
    """kill -9 of all workers: what they have computed is with the owner, and is fetched from there."""
    bodies = prompts.bodies(4, 300, 20)
    expected = outcomes(server, bodies)

    def are_fetched() -> bool:
        """Not at once where pages were still on their way to the owner, or came too late to be waited for."""
        server.replace_workers()
        streams = asyncio.run(run_all(server.url, bodies))
        assert [stream.outcome for stream in streams] == expected
        return all(stream.usage["prompt_tokens_details"]["cached_tokens"] == 256 for stream in streams)

    eventually(are_fetched)
    eventually(lambda: server.counter("store_gets_as_hit") > 0)


@pytest.mark.parametrize("part", [MASTER, OWNER])
def test_streams_survive_the_death_of_the_store(server: Server, prompts: Prompts, part: str) -> None:
    """kill -9 of the master, or of the owner with all pages, while eight streams run: each ends with the
    exact tokens, and the store that comes back is used."""
    bodies = prompts.bodies(8, 150, 300)
    expected = outcomes(server, bodies)
    killed = process_of(server, part)
    streams = run_while(server.url, bodies, killed.kill)
    assert [stream.outcome for stream in streams] == expected
    assert process_of(server, part).pid != killed.pid
    wait_until_used(server, prompts)


def test_requests_are_computed_while_the_store_is_away(server: Server, prompts: Prompts) -> None:
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
    finally:
        master.resume()
    wait_until_used(server, prompts)
    assert outcomes(server, new) == away
    eventually(lambda: not is_left_alone(server))
    assert process_of(server, MASTER).pid == master.pid
