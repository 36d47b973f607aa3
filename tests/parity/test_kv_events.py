"""The subscriber of docs/kv_events.md mirrors the prefix index of a worker in another process."""

import json
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.server import EVENTUALLY_S_MAX, NO_TLS, Server, eventually
from tests.support.workers.subscriber import Subscriber, documented_subscriber

ROOT = Path(__file__).parents[2]
Shown = dict[str, object]
SILENT_MAX = 60
SIZES = ("--mixed", "2", "--memory", "8MiB", "--page-size", "16", "--max-model-len", "600")


class Worker:
    """A process with a real engine of keeper. Its index is what it prints."""

    def __init__(self, folder: Path, kernel_cache: Path, buffer_steps: int) -> None:
        command = [sys.executable, "-m", "tests.support.workers.kv_event_worker"]
        self._process = subprocess.Popen(
            [*command, str(folder), str(kernel_cache), str(buffer_steps)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, num_requests: int) -> Shown:
        """Answer random requests. Return the pages with their parents, and the restorable keys, in hex."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_requests}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def subscriber_of(folder: Path) -> Subscriber:
    return documented_subscriber().Subscriber(f"ipc://{folder}/live", f"ipc://{folder}/past")


@contextmanager
def working(folder: Path, kernel_cache: Path, buffer_steps: int = 10_000) -> Generator[Worker]:
    worker = Worker(folder, kernel_cache, buffer_steps)
    try:
        yield worker
    finally:
        worker.kill()


def receive_until_equal(subscriber: Subscriber, shown: Shown) -> None:
    """Receive batches until the mirror equals what the worker has shown."""
    silent = 0
    while silent < SILENT_MAX:
        mirror = subscriber.mirror
        pages = {key.hex(): parent and parent.hex() for key, (parent, _) in mirror.pages.items()}
        if (pages, sorted(key.hex() for key in mirror.restorable)) == (shown["pages"], shown["restorable"]):
            return
        silent = 0 if subscriber.receive(1000) else silent + 1
    raise AssertionError("the mirror never equals the index")


def skip(subscriber: Subscriber, num_batches: int) -> None:
    """Lose batches that have come."""
    for _ in range(num_batches):
        assert subscriber.live.poll(20_000)
        subscriber.live.recv_multipart()


def test_subscriber_mirrors_a_worker_process(tmp_path: Path, kernel_cache: Path) -> None:
    """It comes late, loses batches that a replay has, and sees the worker start again."""
    with working(tmp_path, kernel_cache) as worker:
        shown = worker.answer(10)
        subscriber = subscriber_of(tmp_path)
        try:
            subscriber.catch_up(20_000)
            receive_until_equal(subscriber, shown)
            shown = worker.answer(30)
            assert shown["removed"], "memory was never short"
            skip(subscriber, 5)
            receive_until_equal(subscriber, shown)
            worker.kill()
            with working(tmp_path, kernel_cache) as again:
                receive_until_equal(subscriber, again.answer(3))
        finally:
            subscriber.close()


def test_subscriber_that_lost_batches_for_good_gets_everything(tmp_path: Path, kernel_cache: Path) -> None:
    with working(tmp_path, kernel_cache, buffer_steps=2) as worker:
        subscriber = subscriber_of(tmp_path)
        try:
            worker.answer(10)
            subscriber.catch_up(20_000)
            shown = worker.answer(20)
            skip(subscriber, 10)
            receive_until_equal(subscriber, shown)
        finally:
            subscriber.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/live",
        "replay_endpoint": f"ipc://{tmp_path}/past",
    }
    arguments = ["keeper", "--port", "0", *SIZES, "--kv-events-config", json.dumps(events)]
    server = Server(arguments, tmp_path / "log")
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def complete(server: Server, num_prompts: int) -> None:
    for number in range(num_prompts):
        body = {"model": "keeper", "prompt": f"{number % 5} keepers of a lighthouse " * 6, "max_tokens": 8}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=EVENTUALLY_S_MAX, verify=NO_TLS)
        assert answer.status_code == 200, answer.text


def test_mirrors_equal_the_reports_of_workers(server: Server, tmp_path: Path) -> None:
    code = documented_subscriber()
    subscribers: dict[str, Subscriber] = {
        name: code.Subscriber(f"ipc://{tmp_path}/live{suffix}", f"ipc://{tmp_path}/past{suffix}")
        for name, suffix in (("mixed-0", ""), ("mixed-1", ".1"))
    }

    def are_equal() -> bool:
        for subscriber in subscribers.values():
            while subscriber.receive(200):
                pass
        found = {name: len(subscriber.mirror.restorable) for name, subscriber in subscribers.items()}
        return found == {row["info"]["name"]: row["restorable_depths"] for row in server.workers()}

    try:
        complete(server, 20)
        eventually(are_equal)
        assert any(subscriber.mirror.restorable for subscriber in subscribers.values())
        assert 0 < server.counter("prefix_found_tokens") <= server.counter("prefix_queried_tokens")
        assert 0 < server.counter("prefix_resumed_tokens") <= server.counter("prefix_queried_tokens")
        server.replace_workers()
        complete(server, 3)
        eventually(are_equal)
    finally:
        for subscriber in subscribers.values():
            subscriber.close()
