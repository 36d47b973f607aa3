"""GCS with its storage in Redis is killed and started again amid streams: every stream is exact, and the
fleet is scaled and mended again.

`ray start --block` ends the head node with it, as in a pod of KubeRay. The server and its workers are on
another node.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import ray
import yaml

from tests.support.e2e.faults import GCS, SUPERVISOR, run_until
from tests.support.e2e.history import Ask, Call, asks, broken, pauses_s
from tests.support.e2e.nodes import HEAD, NET, Nodes
from tests.support.e2e.server import Server, command_of, eventually, run_cli
from tests.support.sockets import free_port
from tidemill.cluster.cli import main as cli

RAY: Any = ray  # much of it has no types
REDIS = shutil.which("redis-server")
NODE = f"{NET}.3"
NODE_OF_SERVER = "TIDEMILL_TEST_NODE_OF_SERVER"
AWAY_S = 6.0
"""More than every interval of ours; less than the minute after which Ray's processes end without GCS."""

WIDTH = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason="GCS has no storage: as root, apt-get install redis-server"),
]


@dataclass
class Cluster:
    """A Ray cluster whose head can be killed and started again, and a server that has joined it."""

    nodes: Nodes
    server: Server

    def part(self, name: str) -> psutil.Process:
        (found,) = (process for process in self.nodes.processes() if name in command_of(process))
        return found

    def restart_gcs(self, meanwhile: Callable[[], None]) -> None:
        """Kill -9 GCS, do `meanwhile`, and start it again at the same address with the same storage."""
        self.part(GCS).kill()
        eventually(lambda: not self.nodes.processes(HEAD))
        meanwhile()
        self.nodes.add_head()


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    """Run Redis, which keeps everything in its memory."""
    assert REDIS is not None
    port = free_port()
    options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--dir": tempfile.gettempdir()}
    command = [REDIS, *(word for option in options.items() for word in option)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def cluster(redis: str) -> Iterator[Cluster]:
    group = {"memory": "64MiB", "labels": {"side": "far"}}
    groups = [{"role": "prefill", **group}, {"role": "decode", "replicas": 2, **group}]
    with tempfile.TemporaryDirectory(prefix="gcs-") as short, pytest.MonkeyPatch.context() as patch:
        folder = Path(short)  # for Ray's sockets
        patch.setenv(NODE_OF_SERVER, NODE)
        nodes = Nodes(folder, redis=redis)
        try:
            nodes.add(NODE, "side=far")
            config = {
                "models": [{"model": "keeper", "groups": groups}],
                "edge": {"port": 0},
                "cluster": {"ray_address": nodes.address, "host": "node-plain"},
            }
            file = folder / "cluster.yaml"
            file.write_text(yaml.safe_dump(config))
            with nodes.serve(file, folder / "server.log", __name__) as server:
                yield Cluster(nodes, server)
            eventually(lambda: not nodes.actors())
        finally:
            nodes.kill()


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Server:
    return cluster.server


@pytest.fixture(scope="module")
def asked() -> list[Ask]:
    return asks(Random(11), WIDTH, num_tokens=100, max_tokens=600)


def streams_while(cluster: Cluster, asked: list[Ask], fault: Callable[[], None]) -> Sequence[Call]:
    """Stream `asked` again and again, until some time after the fault."""

    async def main() -> Sequence[Call]:
        done = asyncio.Event()
        running = asyncio.create_task(run_until(cluster.server, asked, "away", WIDTH, done))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(fault)
        await asyncio.sleep(AWAY_S / 2)
        done.set()
        return (await running).calls

    return asyncio.run(main())


def test_streams_are_unchanged_while_gcs_is_away_and_after_it(
    cluster: Cluster, asked: list[Ask], calm: list[Call]
) -> None:
    """A worker is killed while GCS is away: it alone is replaced, after the restart of GCS."""
    before, gcs, killed_s = cluster.server.lives(), cluster.part(GCS), time.monotonic()
    (pid,) = (row["info"]["pid"] for row in cluster.server.workers() if row["info"]["name"] == "decode-0")

    def lose_worker() -> None:
        time.sleep(AWAY_S / 2)
        psutil.Process(pid).kill()
        time.sleep(AWAY_S / 2)

    calls = streams_while(cluster, asked, lambda: cluster.restart_gcs(lose_worker))
    found = [broken(call, calm[number % WIDTH]) for number, call in enumerate(calls)]
    assert found == [[] for _ in calls]
    assert cluster.part(GCS).pid != gcs.pid
    waits = [max(pauses_s([call], call.sent_s), default=0.0) for call in calls if call.ended_s > killed_s]
    sys.stdout.write(f"{len(calls)} streams, the longest pause of one {max(waits):.2f} s\n")

    def is_replaced() -> bool:
        now = cluster.server.lives()
        changed = {name for name in before if now.get(name) != before[name]}
        assert changed == {"decode-0"}
        return now.keys() == before.keys()

    eventually(is_replaced)


def test_fleet_scales_and_is_mended_after_the_restart_of_gcs(cluster: Cluster) -> None:
    """The supervisor creates a worker and removes it; killed workers and a killed supervisor are replaced."""
    before, server = cluster.server.lives(), cluster.server
    for count in (3, 2):
        ended, _ = run_cli("scale", f"decode={count}", "--wait", "--url", server.url)
        assert ended.returncode == 0, ended.stderr
        eventually(lambda count=count: len(server.workers("decode")) == count)  # a router may know it later
    assert cluster.server.lives() == before
    server.replace_workers()
    cluster.part(SUPERVISOR).kill()
    eventually(lambda: run_cli("scale", "--url", server.url)[0].returncode == 0)


if __name__ == "__main__":  # Ray would choose the head among the nodes of one machine
    RAY.init = partial(RAY.init, _node_ip_address=os.environ[NODE_OF_SERVER])
    sys.exit(cli.main())
