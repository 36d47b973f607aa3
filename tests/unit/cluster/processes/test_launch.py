"""Launch: a slow Ray is started again without leftovers, late nodes are awaited, no end waits for GCS."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import psutil
import pytest
import ray._private.worker
from rich.console import Console

from tidemill.cluster.processes import launch, supervisor_client
from tidemill.cluster.processes.launch import (
    RAY_STARTS_MAX,
    RAY_WAS_SLOW,
    REPORT_S,
    Cluster,
    LaunchError,
    job_of_workers,
)
from tidemill.cluster.processes.scaling.journal import ClusterPlan, initial_plan
from tidemill.cluster.processes.scaling.node_fit import Node
from tidemill.cluster.processes.start_progress import show_progress
from tidemill.cluster.processes.supervisor_client import PRINT, find_actor, keep_stdout
from tidemill.cluster.processes.system import private_folder
from tidemill.cluster.processes.system.private_folder import too_long
from tidemill.cluster.settings import ClusterSettings, FleetSettings, WorkerSettings, ray_environ
from tidemill.cluster.worker.worker_process import Failed, Loading, Ready
from tidemill.workers.settings import EngineSettings

SLOW = f"The current node {RAY_WAS_SLOW}. This could happen"


class SlowRay:
    """A Ray that leaves a process behind whenever it fails to start."""

    def __init__(self, failures: int, reason: str) -> None:
        self.left: list[subprocess.Popen[bytes]] = []
        self._failures = failures
        self._reason = reason

    def init(self, **_: object) -> None:
        self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(self.left) <= self._failures:
            raise Exception(self._reason)  # noqa: TRY002 - as Ray does


def start(ray: SlowRay, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[bool]:
    """Return, for the process of each attempt, whether it still runs."""
    monkeypatch.setattr(launch, "RAY", ray)
    monkeypatch.setattr(private_folder, "SOCKET_PATH_MAX", 1000)
    try:
        Cluster(ClusterSettings(fleets=(), temp_folder=folder)).start_ray()
        return [process.poll() is None for process in ray.left]
    finally:
        for process in ray.left:
            process.kill()
            process.wait()


def test_cluster_retries_ray_that_is_slow_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert start(SlowRay(2, SLOW), monkeypatch, tmp_path) == [False, False, True]
    for reason, starts in ((SLOW, RAY_STARTS_MAX), ("no such address", 1)):
        ray = SlowRay(99, reason)
        with pytest.raises(LaunchError, match=reason):
            start(ray, monkeypatch, tmp_path)
        assert len(ray.left) == starts


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


async def test_loop_that_ends_waits_for_no_search_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks GCS for a minute, and then ends the process with a status of its own."""
    answering, answered = threading.Event(), threading.Event()

    def get_actor(name: str, namespace: str) -> str:
        answering.wait(5.0)
        answered.set()
        return f"{name} of {namespace}"

    monkeypatch.setattr(supervisor_client, "RAY", MagicMock(get_actor=get_actor))
    searching = asyncio.create_task(find_actor("router", "ours"))
    await asyncio.sleep(0.01)
    searching.cancel()
    await asyncio.wait([searching])
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not answered.is_set()
    answering.set()
    assert await find_actor("router", "ours") == "router of ours"


RAY_WORKER: Any = ray._private.worker


def test_ray_prints_nothing_to_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RAY_WORKER, "print_to_stdstream", PRINT)
    keep_stdout()
    message = {"lines": ["A worker died"], "pid": "raylet", "is_err": False}
    RAY_WORKER.print_to_stdstream(message, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert "A worker died" in err


READY = Ready(cast("Any", None))


def test_progress_logs_loaded_bytes_at_most_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    out, now_s = StringIO(), 0.0
    with caplog.at_level(logging.INFO, "tidemill"), show_progress(Console(file=out), lambda: now_s) as show:
        show("Ray", Loading(0, 0))
        show("Ray", None)
        show("prefill-0", Loading(0, 0))
        now_s = 9.9
        show("prefill-0", Loading(1_000_000, 8_000_000))
        assert not caplog.messages
        now_s = 10.0
        show("decode-0", Loading(2_000_000, 8_000_000))
        now_s = 19.9
        show("decode-0", Loading(3_000_000, 8_000_000))
        show("prefill-0", READY)
        now_s = 20.0
        show("decode-0", Loading(4_000_000, 1_234_000_000))
        show("decode-0", Failed("no memory", expected=True))
        now_s = 40.0
        show("prefill-0", READY)
    assert not out.getvalue(), "progress goes to the log, not to the console"
    assert caplog.messages == [
        "loading weights: prefill-0 1 of 8 MB, decode-0 2 of 8 MB",
        "loading weights: decode-0 4 of 1,234 MB",
    ]


@pytest.mark.parametrize("more", [0, 1])
def test_sockets_of_ray_fit_below_the_longest_folder_that_is_taken(more: int) -> None:
    """They have the names that Ray gives them, and the system's limit."""
    session = datetime.now(tz=UTC).strftime(f"session_%Y-%m-%d_%H-%M-%S_%f_{os.getpid()}")
    below = f"/tidemill-01234567/files/{session}/sockets/plasma_store"
    folder = Path("/" + "t" * (107 - len(below) - 1 + more))
    assert ("set TMPDIR=/tmp" in too_long(folder)) == bool(more)
    with (
        socket.socket(socket.AF_UNIX) as ray,
        pytest.raises(OSError, match="too long" if more else "No such"),
    ):
        ray.bind(f"{folder}{below}")


def test_workers_import_nothing_from_the_working_directory() -> None:
    job: Any = job_of_workers()
    job._py_driver_sys_path.extend(["/work"])
    assert not job._get_proto_job_config().py_driver_sys_path
    assert ray_environ(joins=True)["PYTHONSAFEPATH"] == ray_environ(joins=False)["PYTHONSAFEPATH"] == "1"


def test_files_of_our_ray_get_a_new_time(tmp_path: Path) -> None:
    folder = tmp_path / "session" / "sockets"
    folder.mkdir(parents=True)
    (folder / "raylet").touch()
    (folder / "link").symlink_to("nowhere")
    paths = (tmp_path, *tmp_path.rglob("*"))
    for path in paths:
        os.utime(path, (0, 0), follow_symlinks=False)
    launch.touch(tmp_path)
    assert all(path.lstat().st_mtime > 0 for path in paths)
