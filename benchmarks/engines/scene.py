"""Servers of a measurement, the requests that they get, and the figures that it yields."""

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import psutil
from tests.support.e2e.server import Server
from tests.support.sockets import free_port

from benchmarks.peers.models import make_model
from benchmarks.peers.servers import started
from benchmarks.peers.works import drawn, items_of
from tidemill.cluster.bench.client import LoadClient, RequestResult
from tidemill.cluster.bench.command import open_http
from tidemill.cluster.bench.load import run_load
from tidemill.cluster.bench.workloads import Item, Workload

FLAGS = "--enforce-eager --dtype bfloat16 --max-model-len 4096"
MEMORY_BYTES = 512 << 20
THREADS = 1  # of each vLLM
ENVIRON = {"OMP_NUM_THREADS": str(THREADS), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
NAME = "model"  # by which all servers serve it
FIELDS = {"temperature": 0, "ignore_eos": True}


class Figure(NamedTuple):
    """A measured value and the goal that it is not to exceed, if it has one; `details` are what it follows
    from."""

    name: str
    value: float
    goal: float | None
    details: str = ""


class Running(NamedTuple):
    """A server that answers, with its first process."""

    url: str
    root: psutil.Process


@dataclass(frozen=True, slots=True)
class Scene:
    """`python` has vLLM, and `routers` other routers and Ray; `folder` keeps the model, the logs and, while
    it is measured, stored pages."""

    python: Path
    folder: Path
    model: str = "dense"
    routers: Path | None = None

    @contextmanager
    def vllm(self, *flags: str) -> Generator[Running]:
        """Run a vLLM alone, with more flags."""
        port = str(free_port())
        command = [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", self.source, *FLAGS.split()]
        command += ["--served-model-name", NAME, "--port", port]
        command += ["--kv-cache-memory-bytes", str(MEMORY_BYTES), "--enable-prefix-caching"]
        environ = {**ENVIRON, "PYTHONPATH": sources(), "VLLM_SERVER_DEV_MODE": "1"}  # to empty its cache
        url = f"http://127.0.0.1:{port}"
        with started([*command, *flags], environ, url, self.folder / "vllm.log") as root:
            warm(url)
            yield Running(url, root)

    @contextmanager
    def tidemill(self, *arguments: str) -> Generator[Server]:
        """Run ours with vLLM as the engine of its workers."""
        words = ["--engine", "vllm", "--engine-python", str(self.python), "--engine-args", FLAGS]
        words += ["--threads", str(THREADS), "--memory", str(MEMORY_BYTES), *arguments]
        with self.serving(*words) as server:
            yield server

    @contextmanager
    def serving(self, *arguments: str) -> Generator[Server]:
        """Run ours with the model."""
        words = [self.source, "--served-model-name", NAME, "--port", "0"]
        with Server([*words, *arguments], self.folder / "tidemill.log") as server:
            warm(server.url)
            yield server

    @property
    def source(self) -> str:
        """The folder of the model."""
        return str(make_model(self.folder, self.model))


def sources() -> str:
    """Return the folder of our modules, for the Python of vLLM."""
    return str(Path(__file__).parents[2] / "src")


def warm(url: str) -> None:
    """Send the first requests of a server, which are slow."""
    ask(url, prompts(Random(0), 8, 64), 8, 4)


def prompts(rng: Random, count: int, num_tokens: int) -> list[tuple[int, ...]]:
    return [drawn(rng, num_tokens) for _ in range(count)]


class Answers(NamedTuple):
    """The answers to some requests, and the time from the first request to the end of the last answer."""

    results: list[RequestResult]
    wall_s: float

    @property
    def first_token_s(self) -> float:
        return median(result.ttft_s for result in self.results)


def ask(url: str, asked: Sequence[tuple[int, ...]], max_tokens: int, concurrency: int = 1) -> Answers:
    """Send prompts and read the streams. Raises SystemExit when one fails."""
    return send(url, items_of(asked, max_tokens), concurrency)


def send(url: str, items: tuple[Item, ...], concurrency: int) -> Answers:
    """Send requests and read their streams. Raises SystemExit when one fails."""
    return asyncio.run(_send(url, items, concurrency))


async def _send(url: str, items: tuple[Item, ...], concurrency: int) -> Answers:
    async with open_http(url) as http:
        client = LoadClient(http=http, clock_s=time.perf_counter, model=NAME, fields=FIELDS, hints=True)
        begin_s = time.perf_counter()
        results = await run_load(client, Workload("", items), concurrency)
        wall_s = time.perf_counter() - begin_s
    if failed := [result.error for result in results if result.error]:
        raise SystemExit(f"{url}: {failed[0]}")
    return Answers(results, wall_s)
