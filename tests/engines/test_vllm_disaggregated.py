"""Three vLLMs on CPUs behind our edge: one computes prompts, two pull them over NIXL and generate."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.e2e.engine_streams import (
    CLIENT_S_MAX,
    STREAMS,
    TOKENS,
    asks,
    compared,
    processes,
    streamed,
    wait_for_successor,
)
from tests.support.e2e.history import Ask
from tests.support.e2e.server import Server
from tests.support.waits import eventually

ARGUMENTS = "--enforce-eager --dtype float32"  # fewer logits are nearly equal

PROMPT_TOKENS = 400
"""More than a decode worker computes itself."""


@pytest.fixture(scope="module")
def server(nixl_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = [str(model), "--served-model-name", "dense", "--port", "0", "--memory", "256MiB"]
    words += ["--engine", "vllm", "--prefill", "1", "--decode", "2", "--engine-python", str(nixl_python)]
    words += ["--engine-args", ARGUMENTS, "--max-model-len", "4096", "--log-level", "info"]
    with Server(words, tmp_path_factory.mktemp("serving") / "log") as server:
        yield server


def long_asks(start: int) -> list[Ask]:
    """Return the requests of the streams, with prompts that begin with tokens from `start`."""
    return [
        replace(ask, body={**ask.body, "prompt": [start + index, *range(20, 19 + PROMPT_TOKENS)]})
        for index, ask in enumerate(asks("dense"))
    ]


def answers(server: Server, start: int) -> list[str]:
    """Return two answers, of which the second is asked for after the first."""
    bodies = [{**ask.body, "stream": False, "stream_options": None} for ask in long_asks(start)[:2]]
    found = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=CLIENT_S_MAX) for body in bodies]
    return [answer.json()["choices"][0]["text"] for answer in found]


def set_roles(server: Server, **roles: str) -> None:
    for name, role in roles.items():
        url = f"{server.url}/cluster/workers/{name.replace('_', '-')}/role"
        assert httpx.post(url, json={"role": role}, timeout=CLIENT_S_MAX).status_code == httpx.codes.OK
    wanted = {name.replace("_", "-"): role for name, role in roles.items()}
    eventually(lambda: {row["info"]["name"]: row["info"]["role"] for row in server.workers()} == wanted)


def engine_of(server: Server, name: str) -> psutil.Process:
    """Return the process of a worker's vLLM that computes."""
    (pid,) = [row["info"]["pid"] for row in server.workers() if row["info"]["name"] == name]
    below = {process.pid for process in psutil.Process(pid).children(recursive=True)}
    (found,) = [each for each in processes(server, "VLLM::Worker") if each.pid in below]
    return found


def test_answers_are_those_of_mixed_workers_which_their_roles_may_become(server: Server) -> None:
    lives, before = server.lives(), server.counter("fetched_bytes")
    pulled = answers(server, 500)
    eventually(lambda: server.counter("fetched_bytes") > before)
    (prefill,) = server.workers("prefill")
    assert prefill["load"]["counters"]["computed_tokens"] >= 2 * PROMPT_TOKENS
    before = server.counter("fetched_bytes")
    set_roles(server, prefill_0="mixed", decode_0="mixed", decode_1="mixed")
    assert answers(server, 500) == pulled
    assert server.counter("fetched_bytes") == before
    set_roles(server, prefill_0="decode", decode_0="prefill", decode_1="decode")
    answers(server, 540)
    eventually(lambda: server.counter("fetched_bytes") > before)
    set_roles(server, prefill_0="prefill", decode_0="decode", decode_1="decode")
    assert server.lives() == lives, "no vLLM is started again for another role"
    assert server.counter("fetches_failed") == 0


@pytest.mark.parametrize(("victim", "begun"), [("prefill-0", 1), ("decode-0", 1), ("decode-1", STREAMS)])
def test_kill_cuts_no_stream(server: Server, victim: str, begun: int) -> None:
    """Prompts are computed, and pulled, while the first stream has begun."""
    eventually(lambda: [row["state"] for row in server.workers()] == ["ready"] * 3)
    lives, asked = server.lives(), long_asks(1000 + sum(map(ord, victim)) + begun * 100)
    calls = asyncio.run(streamed(server, asked, engine_of(server, victim), begun=begun))
    assert [call.trouble for call in calls] == [[]] * STREAMS
    assert {call.num_tokens for call in calls} == {TOKENS}
    calm = asyncio.run(streamed(server, asked))
    print(f"{victim}, {begun} begun: {compared(calls, calm)}")  # noqa: T201 - a figure of docs/vllm.md
    wait_for_successor(server, lives)
