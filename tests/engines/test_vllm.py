"""Two vLLMs on CPUs behind our edge: answers, prefixes, and streams that go on when one is lost."""

import asyncio
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.e2e.engine_streams import (
    CLIENT_S_MAX,
    STREAMS,
    TOKENS,
    asks,
    compared,
    processes,
    streamed,
    wait_for_both,
    wait_for_successor,
)
from tests.support.e2e.server import Server, run_cli
from tests.support.waits import eventually

ARGUMENTS = "--enforce-eager --dtype bfloat16"


@pytest.fixture(scope="module")
def server(vllm_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = [str(model), "--served-model-name", "dense", "--port", "0", "--memory", "256MiB"]
    words += ["--engine", "vllm", "--mixed", "2", "--engine-python", str(vllm_python)]
    words += ["--engine-args", ARGUMENTS, "--max-model-len", "4096", "--log-level", "info"]
    with Server(words, tmp_path_factory.mktemp("serving") / "log") as server:
        yield server


def complete(server: Server, **fields: object) -> httpx.Response:
    body = {"model": "dense", "prompt": [7, 8, 9], "max_tokens": 16, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=CLIENT_S_MAX)


def choice_of(server: Server, **fields: object) -> dict[str, Any]:
    answer = complete(server, **fields)
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer.json()["choices"][0]


def test_answers(server: Server) -> None:
    greedy = choice_of(server)
    assert choice_of(server) == greedy
    seeded = {"temperature": 0.9, "seed": 5}
    assert choice_of(server, **seeded)["text"] == choice_of(server, **seeded)["text"]
    scored = choice_of(server, logprobs=3, ignore_eos=True)["logprobs"]
    assert [len(top) for top in scored["top_logprobs"]] == [3] * 16
    assert scored["token_logprobs"] == [max(top.values()) for top in scored["top_logprobs"]]
    guided = choice_of(server, structured_outputs={"regex": "[ab]{5}"}, max_tokens=64)["text"]
    assert re.fullmatch("[ab]{5}", guided)
    assert choice_of(server, structured_outputs={"choice": ["left", "right"]})["text"] in {"left", "right"}


def test_refusals_name_the_field(server: Server) -> None:
    for fields, named in (
        ({"temperature": 2.5}, "temperature"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
    ):
        answer = complete(server, **fields)
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert named in answer.json()["error"]["message"]


def test_shared_prefix_is_found_where_it_is(server: Server) -> None:
    """The depths that vLLM announces lead the second request to the first one's worker."""
    prompt = [*range(20, 620)]
    complete(server, prompt=prompt)
    eventually(lambda: sum(row["restorable_depths"] for row in server.workers()) >= 4)
    before = server.counter("prefix_resumed_tokens")
    usage = complete(server, prompt=[*prompt[:-1], 11]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 512
    eventually(lambda: server.counter("prefix_resumed_tokens") >= before + 512)


def test_client_that_leaves_ends_its_request(server: Server) -> None:
    body = {**asks("dense")[0].body, "max_tokens": 3000}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=CLIENT_S_MAX) as answer:
        lines = answer.iter_lines()  # without a name it would be closed, and the answer with it
        next(lines)
        eventually(lambda: sum(row["load"]["running_rows"] for row in server.workers()) == 1)
    eventually(lambda: sum(row["load"]["running_rows"] for row in server.workers()) == 0)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("VLLM::Worker", signal.SIGKILL),
        ("vllm.entrypoints", signal.SIGKILL),
        ("ray::WorkerActor", signal.SIGKILL),
        ("VLLM::EngineCore", signal.SIGSTOP),  # its HTTP server answers on, and the steps stand still
    ],
)
def test_lost_engine_cuts_no_stream_and_is_started_again(server: Server, victim: str, number: int) -> None:
    calm = asyncio.run(streamed(server, asks("dense")))
    wait_for_both(server)
    lives = server.lives()
    calls = asyncio.run(streamed(server, asks("dense"), processes(server, victim)[0], number))
    assert [call.trouble for call in calls] == [[]] * STREAMS
    assert {call.num_tokens for call in calls} == {TOKENS}
    print(f"{victim}: {compared(calls, calm)}")  # noqa: T201 - a figure of docs/vllm.md
    wait_for_successor(server, lives)


@pytest.mark.parametrize(
    ("arguments", "weights", "line"),
    [
        ("--nope", None, "exit code 2: .*unrecognized arguments: --nope; correct --engine-args"),
        ("--enforce-eager", b"no weights", "exit code 1: .*SafetensorError: .*header"),
    ],
)
def test_vllm_that_does_not_start_ends_the_server_with_a_line(
    vllm_python: Path, model: Path, tmp_path: Path, arguments: str, weights: bytes | None, line: str
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    if weights is not None:
        (broken / "model.safetensors").write_bytes(weights)
    words = f"serve {broken} --port 0 --memory 256MiB --engine vllm --engine-python {vllm_python}".split()
    ended, alive = run_cli(*words, "--max-model-len", "4096", f"--engine-args={arguments}")
    assert ended.returncode == 2
    assert re.search(f"mixed-0: vLLM ended with {line}", " ".join(ended.stderr.split()))
    assert not alive


def test_stream_that_vllm_starts_again_ends_by_name(server: Server) -> None:
    """A guided stream is complete, or ends with an event that names the grammar."""
    wait_for_both(server)
    guided = asks("dense", structured_outputs={"regex": "(a|b){200,}"}, ignore_eos=False)
    calls = asyncio.run(streamed(server, guided, processes(server, "VLLM::Worker")[0]))
    lost = [call for call in calls if call.trouble]
    assert lost
    assert all("exactly with grammar" in call.trouble[0] for call in lost)
    assert {call.num_tokens for call in calls if not call.trouble} <= {TOKENS}
