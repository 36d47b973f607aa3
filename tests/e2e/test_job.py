"""`ray job submit`: a server on a Ray cluster of two nodes that somebody else started, with tokens."""

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.e2e.server import READY, eventually

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).parent / "ray"
LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return one.getsockname()[1]


class Nodes:
    """A Ray cluster of two nodes on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._url = f"http://{LOOPBACK}:{free_port()}"
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        port = free_port()
        self._processes: list[psutil.Popen] = []
        self._start("head", f"--head --port={port} --dashboard-port={self._url.rpartition(':')[2]}")
        eventually(lambda: self.ray("list", "nodes").returncode == 0)
        self._start("other", f"--address={LOOPBACK}:{port}")
        eventually(lambda: self.ray("list", "nodes").stdout.count("ALIVE") == 2)

    def _start(self, name: str, options: str) -> None:
        common = (
            f"start {options} --block --num-cpus=1 --node-ip-address={LOOPBACK} --temp-dir={self._folder}"
            " --min-worker-port=0 --max-worker-port=0 --object-store-memory=80000000"
        )
        with (self._folder / name).open("w") as log:
            process = psutil.Popen([RAY, *common.split()], env=self._environ, stdout=log, stderr=log)
        self._processes.append(process)

    def ray(self, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [RAY, *arguments, "--address", self._url],
            env={**self._environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, folder: Path, *command: str) -> str:
        """The name of a job that Ray has taken. Nodes are there before their agents, which take jobs: a try
        that came too early may leave a job that will never run, so each has a name of its own."""
        tries = count()

        def is_taken() -> bool:
            options = ("--no-wait", "--submission-id", f"serve-{next(tries)}", "--working-dir", str(folder))
            arguments = [RAY, "job", "submit", *options, "--address", self._url, "--", *command]
            return subprocess.run(arguments, env=self._environ, check=False).returncode == 0

        eventually(is_taken)
        return f"serve-{next(tries) - 1}"

    def logged(self, job: str, text: str) -> bool:
        """Whether the job has written it; fails with all that it has written when the job has ended."""
        status = self.ray("job", "status", job)
        logs = self.ray("job", "logs", job).stdout
        has_ended = re.search("FAILED|SUCCEEDED|STOPPED", status.stdout)
        assert not has_ended, f"{status.stdout}\n{logs}"
        return text in logs

    def actors(self) -> list[psutil.Process]:
        """Processes of ours that these nodes run."""
        found: list[psutil.Process] = []
        for process in (one for node in self._processes for one in node.children(recursive=True)):
            with suppress(psutil.Error):  # it ends meanwhile
                if "Actor" in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return found

    def stop(self) -> None:
        """At once: told politely, a node waits half a minute."""
        processes = [one for node in self._processes for one in (node, *node.children(recursive=True))]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="job-") as folder:  # a short path, for Ray's sockets
        nodes = Nodes(Path(folder))
        try:
            yield nodes
        finally:
            nodes.stop()


def test_a_job_serves_until_it_is_stopped(nodes: Nodes, tmp_path: Path) -> None:
    options = yaml.safe_load((ROOT / "deploy" / "job.yaml").read_text())
    port = free_port()
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**options, "port": port, "memory": "32MiB"}))
    stranger = nodes.ray("job", "list", RAY_AUTH_TOKEN="0" * 32)
    assert stranger.returncode != 0

    command = str(Path(sys.executable).parent / "tidemill")
    job = nodes.submit(tmp_path, command, "serve", "--config", "job.yaml")
    eventually(lambda: nodes.logged(job, READY))
    body = {"model": "keeper", "prompt": [5] * 200, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["prefilled_tokens"] == 192
    assert len(nodes.actors()) == 3, "a router and two workers"

    assert nodes.ray("job", "stop", job).returncode == 0
    eventually(lambda: not nodes.actors())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{LOOPBACK}:{port}/health")
    assert nodes.ray("list", "nodes").stdout.count("ALIVE") == 2, "the cluster is somebody else's"
