"""A Ray cluster of several nodes on this machine, each at a loopback address of its own, with tokens."""

import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from tests.support.e2e.server import MARK, READY, Server, eventually, marked
from tests.support.sockets import free_port

RAY = Path(sys.executable).parent / "ray"
NET = f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
"""A network of this process alone, because another process may have nodes as well."""

HEAD = f"{NET}.2"
STARTED = "Ray runtime started."


class Nodes:
    """The first one is the head. They end in `stop`, or one by one in `kill`."""

    def __init__(
        self, folder: Path, *, dashboard: bool = False, labels: str = "", head: str = HEAD, redis: str = ""
    ) -> None:
        """`folder`: a short path, for Ray's sockets; `head`: the address of the first one; `redis`: the
        address of GCS's storage, without which GCS starts empty."""
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # at Ray's 15 actors wait for the tests beside them
            **({"RAY_REDIS_ADDRESS": redis} if redis else {}),
        }
        self._labels = labels
        self.address = self.url = ""
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # by host

        def head_options() -> str:
            port, web = free_port(head), free_port(head)
            self.address, self.url = f"{head}:{port}", f"http://{head}:{web}"
            with_web = f"--dashboard-host={head} --dashboard-port={web}"
            with_web = with_web if dashboard else "--include-dashboard=false"
            return f"--head --port={port} --temp-dir={folder} {with_web}"

        self._start(head, head_options, labels, {})

    def add(self, host: str, labels: str = "", namespace: str = "", **environ: str) -> None:
        """One more, which is there when this returns; one at a time, as Ray wants nodes of one machine.
        `namespace`: of the network, where it runs."""
        self._start(host, lambda: f"--address={self.address}", labels, environ, namespace)

    def add_head(self) -> None:
        """Start the first one again, at its address, after its end."""
        host, _, port = self.address.partition(":")

        def options() -> str:
            # With this file Ray takes another node's process for a head that runs. A new pod has none.
            (self._folder / "ray_current_cluster").unlink(missing_ok=True)
            return f"--head --port={port} --temp-dir={self._folder} --include-dashboard=false"

        self._start(host, options, self._labels, {})

    def _start(
        self,
        host: str,
        options: Callable[[], str],
        labels: str,
        environ: Mapping[str, str],
        namespace: str = "",
    ) -> None:
        """Again, if it ends: Ray gives a node 30 s to come up, and a port may be taken meanwhile."""
        log = self._folder / f"{host}.log"

        def is_there() -> bool:
            started = self._started.get(host)
            if started is None or started.poll() is not None:
                self.kill(host)
                common = (
                    f"start {options()} --block --num-cpus=1 --node-ip-address={host} --min-worker-port=0"
                    " --max-worker-port=0 --object-store-memory=80000000 --dashboard-agent-listen-port=0"
                )
                extra = [f"--labels={labels}"] if labels else []
                within = ["ip", "netns", "exec", namespace] if namespace else []
                with log.open("w") as output:
                    self._started[host] = subprocess.Popen(
                        [*within, RAY, *common.split(), *extra],
                        env={**self._environ, **environ, MARK: f"{self._mark} {host}"},
                        stdout=output,
                        stderr=output,
                    )
            return STARTED in log.read_text()

        eventually(is_there)

    def processes(self, host: str = "") -> list[psutil.Process]:
        """Return the processes that run on one node, or on all."""
        return marked(f"{self._mark} {host}")

    def actors(self) -> list[psutil.Process]:
        """Return our actors on all nodes."""
        found: list[psutil.Process] = []
        for process in self.processes():
            with suppress(psutil.Error):  # it ends meanwhile
                if "Actor" in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return found

    def kill(self, host: str = "") -> None:
        """Kill everything on the node together, like a power cut."""
        processes = self.processes(host)
        while processes:
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes)
            processes = self.processes(host)  # what was being started meanwhile
        for name in [name for name in self._started if name.startswith(host)]:
            self._started.pop(name).wait()

    def serve(self, config: Path, log: Path, module: str = "tidemill") -> Server:
        """Start a server on this cluster; the configuration file has its address."""
        return Server(["--config", str(config)], log, module, environ=self._environ)

    def run(self, *command: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        """A command that knows the token, unless it is given another one."""
        return subprocess.run(
            command, env={**self._environ, **environ}, capture_output=True, text=True, check=False
        )

    def submit(self, folder: Path, *command: str) -> str:
        """Return the name of a job that Ray has taken. Nodes are there before their agents, which take jobs:
        a try that came too early may leave a job that will never run, so each has a name of its own."""
        names: list[str] = []

        def is_taken() -> bool:
            names.append(f"serve-{len(names)}")
            options = ("--no-wait", "--submission-id", names[-1], "--working-dir", str(folder))
            ended = self.run(str(RAY), "job", "submit", *options, "--address", self.url, "--", *command)
            return ended.returncode == 0

        eventually(is_taken)
        return names[-1]

    def job_url(self, job: str) -> str:
        """Wait until the server of a job is ready, and return its URL; fail with its log if it has ended."""
        found: list[str] = []

        def is_ready() -> bool:
            status = jobs.get(f"/{job}").json()["status"]
            logs: str = jobs.get(f"/{job}/logs").json()["logs"]
            assert status in {"PENDING", "RUNNING"}, f"{status}\n{logs}"
            found[:] = logs.partition(READY)[2].split("/v1 ")[:1]
            return bool(found[0])

        with self.asks_jobs() as jobs:
            eventually(is_ready)
        return found[0]

    def asks_jobs(self) -> httpx.Client:
        """Return a client for Ray's jobs API."""
        token = self._environ["RAY_AUTH_TOKEN"]
        return httpx.Client(
            base_url=f"{self.url}/api/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=60
        )
