"""Ray that is slow to start is started again, and nothing of the first attempt is left."""

import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.cluster import launch
from tidemill.cluster.launch import RAY_STARTS_MAX, RAY_WAS_SLOW, Cluster, LaunchError
from tidemill.cluster.settings import ClusterSettings


class SlowRay:
    """Leaves a process behind whenever it fails."""

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
        return [one.poll() is None for one in self.left]


def start(ray: SlowRay, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[bool]:
    """Which of the processes of its attempts are left."""
    monkeypatch.setattr(launch, "RAY", ray)
    monkeypatch.setattr(launch, "TEMP_PATH_LENGTH_MAX", 1000)
    try:
        Cluster(ClusterSettings(fleets=(), temp_folder=folder)).start_ray()
        return ray.alive()
    finally:
        for process in ray.left:
            process.kill()
            process.wait()


def test_it_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = SlowRay(2, f"The current node {RAY_WAS_SLOW}. This could happen")
    assert start(ray, monkeypatch, tmp_path) == [False, False, True]


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = SlowRay(99, f"The current node {RAY_WAS_SLOW}. This could happen")
    with pytest.raises(LaunchError, match=RAY_WAS_SLOW):
        start(ray, monkeypatch, tmp_path)
    assert ray.starts == RAY_STARTS_MAX


def test_what_is_wrong_in_another_way_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = SlowRay(99, "no such address")
    with pytest.raises(LaunchError, match="no such address"):
        start(ray, monkeypatch, tmp_path)
    assert ray.starts == 1
