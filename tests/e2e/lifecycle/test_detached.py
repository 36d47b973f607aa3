"""A detached server outlives its command and kills of its processes, and `tidemill down` leaves nothing."""

import asyncio
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.support.e2e.faults import RAYLET, REAPER, SUPERVISOR
from tests.support.e2e.history import Ask, Call, asks
from tests.support.e2e.server import MARK, READY, command_of, eventually, listening_of
from tests.support.e2e.streams import client_of
from tidemill.cluster.processes.system.children import endpoint_pid
from tidemill.cluster.processes.system.private_folder import DetachedServer, detached_servers

pytestmark = pytest.mark.slow

SIZES = ("--prefill", "1", "--decode", "1", "--memory", "64MiB")
KEYS = ("--api-key", "sk-1")


class Detached:
    """The server of `tidemill serve --detach`; `folder` is that for temporary files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="det-"))
        self._mark = uuid.uuid4().hex

    def command(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tidemill", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder), MARK: self._mark},
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with self.command(*arguments) as process:
            out, err = process.communicate()
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def part(self, name: str) -> psutil.Process:
        (process,) = (process for process in self.processes() if name in command_of(process))
        return process

    @property
    def record(self) -> DetachedServer:
        (server,) = detached_servers(self.folder)
        return server

    @property
    def url(self) -> str:
        return self.record.url

    def endpoint(self) -> int:
        pid = endpoint_pid(Path(self.record.root))
        assert pid is not None
        return pid

    def worker_rows(self) -> list[dict[str, Any]]:
        """Return the workers, as `tidemill status` has them."""
        return httpx.get(f"{self.url}/cluster", timeout=300).json()["workers"]

    def workers(self) -> set[str]:
        return {row["info"]["worker"] for row in self.worker_rows()}

    def serves(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health/ready", timeout=5).is_success
        return False

    def nothing_is_left(self) -> bool:
        return not self.processes() and not list(self.folder.iterdir())


@pytest.fixture(scope="module")
def detached() -> Iterator[Detached]:
    detached = Detached()
    try:
        status, out, err = detached.run("serve", "keeper", "--port", "0", *SIZES, "--detach")
        assert status == 0, out + err
        assert out.startswith(READY)
        assert "`tidemill down` ends it" in out
        yield detached
    finally:
        for process in detached.processes():
            with suppress(psutil.Error):
                process.kill()


async def streamed(detached: Detached, asked: list[Ask], at_tokens: int, kill: psutil.Process) -> list[Call]:
    """Run all of `asked` concurrently; kill -9 the process when the first call has that many tokens."""
    calls = [Call(ask) for ask in asked]
    async with client_of(detached.url) as client:
        running = [asyncio.create_task(call.run(client, "salt")) for call in calls]
        assert await calls[0].reach(at_tokens), "too late: make the streams longer"
        kill.kill()
        await asyncio.gather(*running)
    return calls


def test_status_finds_the_detached_server(detached: Detached) -> None:
    status, out, err = detached.run("status")
    assert status == 0, err
    assert f"frontend pid {detached.endpoint()}" in out
    assert set(listening_of(detached.processes())) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "already: end it with `tidemill down`"),
        (KEYS, "--api-keys-file"),
        (("--ray-address", "auto"), "Ray"),
    ],
)
def test_second_start_is_refused_in_one_line(detached: Detached, options: tuple[str, ...], line: str) -> None:
    port = detached.url.rpartition(":")[2]
    status, out, err = detached.run("serve", "keeper", "--port", port, *SIZES, "--detach", *options)
    assert (status, out) == (2, "")
    (refusal,) = err.splitlines()
    assert line in refusal
    assert len(list(detached.folder.iterdir())) == 1, "nothing is left of it"


def test_streams_are_unchanged_by_the_loss_of_a_detached_supervisor(detached: Detached) -> None:
    asked = asks(Random(4), 8, num_tokens=100, max_tokens=240)
    endpoint, workers = detached.endpoint(), detached.workers()
    found = asyncio.run(streamed(detached, asked, 20, detached.part(SUPERVISOR)))
    eventually(lambda: detached.run("scale")[0] == 0)
    assert [call.trouble for call in found] == [[] for _ in found]
    assert (detached.endpoint(), detached.workers()) == (endpoint, workers)


def test_killed_endpoint_is_started_again_and_the_workers_stay(detached: Detached) -> None:
    """Its streams break. The same requests are answered by the next process, from the cache."""
    asked = asks(Random(5), 8, num_tokens=300, max_tokens=4000)
    endpoint, workers = detached.endpoint(), detached.workers()
    found = asyncio.run(streamed(detached, asked, 20, psutil.Process(endpoint)))
    assert any(call.trouble for call in found), "too late: make the streams longer"
    eventually(detached.serves)
    assert detached.endpoint() != endpoint
    maps = psutil.Process(detached.endpoint()).memory_maps()
    assert not [mapped.path for mapped in maps if "libtorch" in mapped.path], (
        "it starts a second faster without"
    )
    assert detached.workers() == workers
    body: dict[str, Any] = {
        "model": "keeper",
        "prompt": [5] * 300,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    first, second = (
        httpx.post(f"{detached.url}/v1/completions", json=body, timeout=300).json() for _ in range(2)
    )
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 256


def test_endpoint_and_supervisor_survive_their_concurrent_loss(detached: Detached) -> None:
    eventually(detached.serves)  # also where an earlier test did not get so far
    workers = detached.workers()
    psutil.Process(detached.endpoint()).kill()
    detached.part(SUPERVISOR).kill()
    eventually(detached.serves)
    assert detached.workers() == workers


def test_down_leaves_nothing(detached: Detached) -> None:
    status, out, err = detached.run("down")
    assert status == 0, err
    assert out.endswith(" has ended\n")
    eventually(detached.nothing_is_left)
    status, _, err = detached.run("down")
    assert (status, err) == (
        2,
        "tidemill: no detached server runs here: `tidemill serve --detach` starts one\n",
    )


def test_server_becomes_ready_without_its_command(detached: Detached) -> None:
    """Kill -9 of the command when the endpoint has begun to start; then end Ray, and the reaper, which would
    remove what is left."""
    with detached.command("serve", "keeper", "--port", "0", *SIZES, "--detach") as starting:
        eventually(lambda: bool(list(detached.folder.glob("*/endpoint.lock"))))
        starting.kill()
    eventually(detached.serves)
    detached.part(REAPER).kill()
    detached.part(RAYLET).kill()
    eventually(lambda: not detached.record.is_running())
    url = detached.url
    _, _, err = detached.run("status")
    assert err.splitlines()[0] == f"tidemill: the detached server at {url} has ended: what it left is removed"
    eventually(detached.nothing_is_left)


def test_failed_start_prints_one_line_and_leaves_nothing(detached: Detached, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, out, err = detached.run("serve", str(tmp_path), "--port", "0", *SIZES, "--detach")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    eventually(detached.nothing_is_left)
