"""Launch: a slow Ray is started again without leftovers, late nodes are awaited, and no end waits for GCS."""

import asyncio
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from tidemill.cluster.processes import launch, supervisor_client
from tidemill.cluster.processes.launch import RAY_STARTS_MAX, RAY_WAS_SLOW, REPORT_S, Cluster, LaunchError
from tidemill.cluster.processes.scaling.journal import ClusterPlan, initial_plan
from tidemill.cluster.processes.scaling.node_fit import Node
from tidemill.cluster.processes.supervisor_client import find_actor
from tidemill.cluster.settings import ClusterSettings, FleetSettings, WorkerSettings
from tidemill.workers.settings import EngineSettings

SLOW = f"The current node {RAY_WAS_SLOW}. This could happen"


class SlowRay:
    """A Ray that leaves a process behind whenever it fails to start."""

    def __init__(self, failures: int, reason: str) -> None:
        self.left: list[subprocess.Popen[bytes]] = []
        self._failures = failures
        self._reason = reason
        self.starts = 0

    def init(self, **_: object) -> None:
        self.starts += 1
        self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if self.starts <= self._failures:
            raise Exception(self._reason)  # noqa: TRY002 - as Ray does

    def alive(self) -> list[bool]:
        return [process.poll() is None for process in self.left]


def start(ray: SlowRay, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[bool]:
    """Return, for the process of each attempt, whether it still runs."""
    monkeypatch.setattr(launch, "RAY", ray)
    monkeypatch.setattr(launch, "TEMP_PATH_LENGTH_MAX", 1000)
    try:
        Cluster(ClusterSettings(fleets=(), temp_folder=folder)).start_ray()
        return ray.alive()
    finally:
        for process in ray.left:
            process.kill()
            process.wait()


def test_cluster_retries_ray_that_is_slow_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert start(SlowRay(2, SLOW), monkeypatch, tmp_path) == [False, False, True]


@pytest.mark.parametrize(("reason", "starts"), [(SLOW, RAY_STARTS_MAX), ("no such address", 1)])
def test_cluster_that_stays_slow_or_fails_otherwise_raises(
    reason: str, starts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = SlowRay(99, reason)
    with pytest.raises(LaunchError, match=reason):
        start(ray, monkeypatch, tmp_path)
    assert ray.starts == starts


def test_ray_that_does_not_kill_actors_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls may wait for minutes."""
    monkeypatch.setattr(launch, "RAY", MagicMock())
    monkeypatch.setattr(launch, "KILL_ACTORS_S_MAX", 0.2)
    waits, ended = threading.Event(), threading.Event()

    def end_actors(_: Cluster) -> None:
        waits.wait(30)
        ended.set()

    monkeypatch.setattr(Cluster, "_end_actors", end_actors)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        cluster = Cluster(MagicMock(detached_folder=None))
        started = psutil.Process(process.pid)
        monkeypatch.setattr(cluster, "_supervisor", MagicMock())
        monkeypatch.setattr(cluster, "_processes", [started])
        monkeypatch.setattr(cluster, "_essential", {"GCS": started})
        cluster.stop()
        assert not started.is_running()
        assert not ended.is_set(), "it was waited for"
        waits.set()


def test_cluster_waits_for_late_nodes_and_reports_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The report has the missing resources; after the timeout the same line is the error."""
    ray = MagicMock()
    ray.wait.return_value = ([], [])
    ray.util.placement_group_table.return_value = {"state": "PENDING"}
    monkeypatch.setattr(launch, "RAY", ray)
    monkeypatch.setattr(launch, "POLL_S", 0.0)
    monkeypatch.setattr(launch, "nodes", lambda: [Node(id="a", address="10.0.0.1", total={}, free={})])
    engine = EngineSettings(model_folder=tmp_path, memory_bytes=0, store_url="memory:", cache_folder=tmp_path)
    worker = WorkerSettings(name="decode-0", role="decode", engine=engine, num_gpus=1)
    settings = ClusterSettings(fleets=(FleetSettings(workers=(worker,)),), schedule_timeout_s=5.5 * REPORT_S)
    messages: list[str] = []

    def wait() -> None:
        cluster = Cluster(settings)
        plan = ClusterPlan(fleets=tuple(map(initial_plan, settings.fleets)))
        monkeypatch.setattr(cluster, "_plan", plan)
        seconds = count(0.0, 5.0)
        cluster.wait_until_ready(MagicMock(), messages.append, lambda: next(seconds))

    with pytest.raises(LaunchError, match=r"^decode-0 needs .GPU: 1. on one node"):
        wait()
    assert [line.partition(" s: ")[0] for line in messages] == [
        f"still waiting for decode-0 after {minute * REPORT_S:.0f}" for minute in range(1, 6)
    ]
    assert all("decode-0 needs {GPU: 1}" in line for line in messages)

    ray.util.placement_group_table.return_value = {"state": "CREATED"}
    messages.clear()
    ray.wait.side_effect = [([], [])] * 200
    with pytest.raises(StopIteration):  # it is scheduled, and its process takes longer than that
        wait()
    assert messages[-1].endswith("after 960 s: Ray starts processes for them")


def test_loop_that_ends_waits_for_no_search_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks GCS for a minute, and then ends the process with a status of its own."""
    answering, answered = threading.Event(), threading.Event()

    def get_actor(name: str, namespace: str) -> str:
        answering.wait(5.0)
        answered.set()
        return f"{name} of {namespace}"

    monkeypatch.setattr(supervisor_client, "RAY", MagicMock(get_actor=get_actor))

    async def ends_early() -> None:
        searching = asyncio.create_task(find_actor("router", "ours"))
        await asyncio.sleep(0.01)
        searching.cancel()

    asyncio.run(ends_early())
    assert not answered.is_set()
    answering.set()
    assert asyncio.run(find_actor("router", "ours")) == "router of ours"
