"""A kill of a backend amid an answer: what the client gets behind other gateways, and behind our edge.

python -m benchmarks.faults.gateways [--environment sglang-router=FOLDER] [--environment vllm-router=FOLDER]

FOLDER is a virtual environment with that package: `pip install sglang-router==0.3.2`, or vllm-router==0.1.17.
Its gateway has three backends, each a server of ours with one worker. Ours is one server with three workers.
All serve keeper, seeded at temperature 1, so that any backend gives the same answer. Once while an answer
streams and once while a whole one is computed, what computes it gets SIGKILL: the processes of a backend
behind a gateway, the worker behind our edge.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from tests.support.e2e.server import Server

from tidemill.cluster.cli.demo import read_demo
from tidemill.cluster.cli.demo_kill import KILL_AFTER_TOKENS, NUM_TOKENS, SEED
from tidemill.workers.sources.names import bundled

BACKENDS = 3
KILL_AFTER_S = 0.3
START_S_MAX = 120.0
TIMEOUT_S = 60.0
COMMANDS = {
    "sglang-router": "bin/sglang-router launch",
    "vllm-router": "bin/vllm-router",
}
OURS = "tidemill"


@dataclass(slots=True)
class Got:
    """An answer as its client got it: the HTTP status, the tokens, and how it ended."""

    status: int = 0
    tokens: list[int] = field(default_factory=list[int])
    end: str = "the connection ended without [DONE]"


def body_of(*, stream: bool) -> dict[str, Any]:
    demo = read_demo(bundled()["keeper"] / "demo.json")
    return {
        "model": "keeper",
        "prompt": f"{demo['notebook']} {demo['questions'][0]['question']}",
        "max_tokens": NUM_TOKENS,
        "seed": SEED,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": True,
    }


async def streamed(url: str, kill: Callable[[], Awaitable[None]] | None = None) -> Got:
    """Stream an answer; call `kill` in its middle."""
    got = Got()
    try:
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/completions", json=body_of(stream=True)) as response,
        ):
            got.status = response.status_code
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    got.end = "[DONE]"
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        got.end = f"an error: {chunk['error']}"
                        continue
                    got.tokens += chunk["choices"][0]["token_ids"]
                    if kill is not None and len(got.tokens) >= KILL_AFTER_TOKENS:
                        await kill()
                        kill = None
    except httpx.HTTPError as error:
        got.end = f"{type(error).__name__}: {error}"
    return got


async def whole(url: str, kill: Callable[[], Awaitable[None]]) -> Got:
    """Ask for an answer that is not streamed, and call `kill` meanwhile."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        asked = asyncio.create_task(client.post(f"{url}/v1/completions", json=body_of(stream=False)))
        await asyncio.sleep(KILL_AFTER_S)
        await kill()
        try:
            response = await asked
        except httpx.HTTPError as error:
            return Got(end=f"{type(error).__name__}: {error}")
    if response.is_error:
        return Got(response.status_code, end=response.text[:200])
    return Got(response.status_code, response.json()["choices"][0]["token_ids"], "whole")


async def kill_backend(backends: list[Server]) -> None:
    """Kill all processes of the backend that has an open answer."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        for backend in list(backends):
            load = (await client.get(f"{backend.url}/load")).json()["server_load"]
            if load:
                for process in backend.processes():
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                backends.remove(backend)
                return
    raise SystemExit("no backend has an open answer: the answer was complete before the kill")


async def kill_worker(url: str) -> None:
    """Kill the worker of ours that generates."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        rows = (await client.get(f"{url}/cluster/requests")).json()["requests"]
        workers = (await client.get(f"{url}/cluster")).json()["workers"]
    pids = {worker["info"]["worker"]: worker["info"]["pid"] for worker in workers}
    os.kill(pids[rows[0]["decode"]], signal.SIGKILL)


@contextmanager
def gateway(name: str, environment: Path, backends: list[Server], log: Path) -> Generator[str]:
    """Run a gateway in front of these backends, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    executable, *rest = COMMANDS[name].split()
    command = [str(environment / executable), *rest, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--worker-urls", *(backend.url for backend in backends)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)  # noqa: S603 - given by the caller
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S_MAX
    try:
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"{name} does not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        asked = body_of(stream=False) | {"max_tokens": 1}
        return httpx.post(f"{url}/v1/completions", json=asked, timeout=TIMEOUT_S, trust_env=False).is_success
    return False


def rows_of(name: str, url: str, kill: Callable[[], Awaitable[None]]) -> Iterator[str]:
    """Yield a line of Markdown for each kill."""
    calm = asyncio.run(streamed(url))
    if calm.end != "[DONE]" or len(calm.tokens) != NUM_TOKENS:
        raise SystemExit(f"{name} without a kill: {calm.end} after {len(calm.tokens)} tokens")
    for kind, ask in (("stream", streamed), ("whole", whole)):
        began_s = time.monotonic()
        got = asyncio.run(ask(url, kill))
        is_right = got.tokens == calm.tokens[: len(got.tokens)]
        yield (
            f"| {name} | {kind} | {got.status or 'none'} | {len(got.tokens)} of {NUM_TOKENS}"
            f"{'' if is_right else ', other ones'} | {got.end} | {time.monotonic() - began_s:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.gateways")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    environments = {
        name: Path(path) for name, _, path in (each.partition("=") for each in options.environment)
    }
    if not environments.keys() <= COMMANDS.keys():
        parser.error(f"the names are {', '.join(COMMANDS)}")
    print("| gateway | answer | HTTP status | tokens | its end | s |")
    print("|---|---|---|---|---|---|")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, environment in environments.items():
            with ExitStack() as stack:
                backends: list[Server] = []
                for index in range(BACKENDS):
                    arguments = ["keeper", "--mixed", "1", "--memory", "64MiB", "--port", "0"]
                    backends.append(Server(arguments, folder / f"{index}.log"))
                    stack.callback(backends[-1].kill_everything)
                url = stack.enter_context(gateway(name, environment, backends, folder / f"{name}.log"))
                for row in rows_of(name, url, lambda: kill_backend(backends)):  # noqa: B023 - called in the loop
                    print(row, flush=True)
        arguments = ["keeper", "--mixed", str(BACKENDS), "--memory", "64MiB", "--port", "0"]
        server = Server(arguments, folder / "ours.log")
        try:
            for row in rows_of(OURS, server.url, lambda: kill_worker(server.url)):
                print(row, flush=True)
        finally:
            server.kill_everything()


if __name__ == "__main__":
    sys.exit(main())
