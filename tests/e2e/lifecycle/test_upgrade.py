"""A rolling upgrade from an earlier commit to this tree, under load: every stream is whole and exact.

`make upgrade-test UPGRADE_FROM=v0.1.0`. Processes import the product through a link, which the upgrade
moves to the new tree; a process that starts then has the new code.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.support.e2e.detached import Detached
from tests.support.e2e.faults import ROUTER, SUPERVISOR, holds
from tests.support.e2e.history import Ask, Call, asks, broken
from tests.support.e2e.server import EdgeProcess, eventually
from tests.support.e2e.streams import client_of
from tests.support.sockets import free_port

BEFORE = os.environ.get("UPGRADE_FROM")
ROOT = Path(__file__).parents[3]
WIDTH = 4
SIZES = ("--mixed", "2", "--memory", "64MiB", "--routers", "2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BEFORE, reason="UPGRADE_FROM names the commit to upgrade from: `make upgrade-test`"
    ),
]


def git(*arguments: str) -> None:
    command = ["git", "-C", str(ROOT), *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The link through which processes import the product: to the tree of the commit before."""
    assert BEFORE is not None
    before, link = tmp_path / "before", tmp_path / "current"
    git("worktree", "add", "--detach", str(before), BEFORE)
    try:
        protos = ("-m", "grpc_tools.protoc", "-I", ".", "--python_out=.")
        protos += ("tidemill/cluster/rpc/proto/generation.proto",)
        subprocess.run([sys.executable, *protos], cwd=before / "src", check=True)
        link.symlink_to(before)
        monkeypatch.setenv("PYTHONPATH", str(link / "src"))
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
        yield link
    finally:
        git("worktree", "remove", "--force", str(before))


@dataclass
class Load:
    """Streams, again and again, of which new ones go to the edge at `url`."""

    url: str
    asked: list[Ask]
    calls: list[Call]
    is_done: bool = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as running:
            for _ in range(WIDTH):
                running.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while not self.is_done:
            number = len(self.calls)
            call = Call(self.asked[number % len(self.asked)])
            self.calls.append(call)
            async with client_of(self.url) as client:
                await call.run(client, f"salt-{number // len(self.asked)}")


class Cluster(Detached):
    """A detached server, whose processes are replaced one by one."""

    def rows(self) -> dict[str, dict[str, Any]]:
        with suppress(httpx.HTTPError, KeyError):
            rows = httpx.get(f"{self.url}/cluster", timeout=30).json()["workers"]
            return {row["info"]["name"]: row for row in rows}
        return {}

    def replace_worker(self, name: str) -> None:
        """Drain it, and let Ray start it again once it is empty."""
        row = self.rows()[name]
        assert self.run("drain", name)[0] == 0
        eventually(lambda: name in self.rows() and not holds(self.rows()[name]))
        psutil.Process(row["info"]["pid"]).kill()

        def is_another() -> bool:
            now = self.rows().get(name)
            return now is not None and now["info"]["worker"] != row["info"]["worker"]

        eventually(is_another)

    def replace_part(self, process: psutil.Process, name: str, serves: Callable[[], bool]) -> None:
        count = len(self.parts(name))
        process.kill()
        eventually(lambda: len(self.parts(name)) == count and not process.is_running())
        eventually(serves)


@dataclass
class Upgrade:
    """A cluster that is upgraded under load, with an edge before and one after it."""

    cluster: Cluster
    link: Path
    folder: Path
    port: int
    ends: ExitStack
    edges: list[EdgeProcess] = field(default_factory=list[EdgeProcess])

    def start_edge(self) -> str:
        """Start an edge, and return its URL."""
        arguments = ("--join", f"127.0.0.1:{self.port},127.0.0.1:{self.port + 1}")
        edge = EdgeProcess(self.folder / f"edge-{len(self.edges)}", *arguments)
        self.edges.append(self.ends.enter_context(edge))
        return self.edges[-1].wait_until_ready()

    def replace_all(self, load: Load) -> float:
        """Replace all processes, edges last; return when the link had moved, in unix time."""
        cluster, moved = self.cluster, self.link.with_name("next")
        moved.symlink_to(ROOT)
        moved.replace(self.link)
        upgraded_s = time.time()
        for name in sorted(cluster.rows()):
            cluster.replace_worker(name)
        for router in cluster.parts(ROUTER):
            cluster.replace_part(router, ROUTER, lambda: len(cluster.rows()) == 2)
        [supervisor] = cluster.parts(SUPERVISOR)
        cluster.replace_part(supervisor, SUPERVISOR, lambda: cluster.run("scale")[0] == 0)
        url, load.url = load.url, self.start_edge()
        eventually(lambda: httpx.get(f"{url}/load", timeout=30).json() == {"server_load": 0})
        assert self.edges[0].stop() == 0
        psutil.Process(cluster.endpoint()).kill()
        eventually(cluster.serves)
        return upgraded_s

    async def run(self, load: Load) -> float:
        loading = asyncio.create_task(load.run())
        try:
            return await asyncio.to_thread(self.replace_all, load)
        finally:
            load.is_done = True
            await loading


async def calm_calls(url: str, asked: list[Ask]) -> list[Call]:
    calls = [Call(ask) for ask in asked]
    async with client_of(url) as client:
        await asyncio.gather(*(call.run(client, "calm") for call in calls))
    return calls


def test_upgrade_under_load_loses_no_stream(link: Path, tmp_path: Path) -> None:
    asked = asks(Random(7), 6, num_tokens=100, max_tokens=160)
    with ExitStack() as ends, Cluster() as cluster:
        upgrade = Upgrade(cluster, link, tmp_path, free_port(), ends)
        cluster.serve("--router-port", str(upgrade.port), *SIZES)
        load = Load(upgrade.start_edge(), asked, [])
        calm = asyncio.run(calm_calls(load.url, asked))
        assert [call.trouble for call in calm] == [[] for _ in asked]
        upgraded_s = asyncio.run(upgrade.run(load))
        pairs = [(call, calm[number % len(asked)]) for number, call in enumerate(load.calls)]
        assert [broken(*pair) for pair in pairs] == [[] for _ in pairs]
        ours = [*cluster.parts(ROUTER), *cluster.parts(SUPERVISOR), *cluster.parts("ray::WorkerActor")]
        ours += [psutil.Process(cluster.endpoint()), psutil.Process(upgrade.edges[-1].pid)]
        assert len(ours) == 7
        assert [process for process in ours if process.create_time() < upgraded_s] == []
        sys.stdout.write(f"{len(pairs)} streams, {len(ours)} processes replaced\n")
        assert cluster.run("down")[0] == 0
        eventually(cluster.nothing_is_left)
