"""The parts of `make abuse`: each has an end, and a verdict whatever happens to it."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.serving.verdicts import GOOD, MISSED, NOT_JUDGED, NOT_RUN, STATUSES

from tests.abuse import __main__ as abuse
from tests.abuse.__main__ import TOO_LONG, Part, main, run
from tests.support.e2e.server import eventually, runs

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (0, GOOD),
        (1, MISSED),
        (2, MISSED),
        (5, MISSED),  # pytest: no tests
        (STATUSES[NOT_RUN], NOT_RUN),
        (STATUSES[NOT_JUDGED], NOT_JUDGED),
    ],
)
def test_verdict_follows_the_exit_status(
    status: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run(Part(("ends", str(status)), 60.0), 60.0) == verdict


def test_part_that_is_over_time_ends_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    child_file = tmp_path / "child"
    waits = subprocess.Popen[bytes].wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """Let the time be over as soon as the part has its child."""
        if timeout is None:
            return waits(process)
        eventually(child_file.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(abuse, "END_S_MAX", 0.1)
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert run(Part(("stubborn", str(child_file)), 5.0), 5.0) == TOO_LONG
    child = int(child_file.read_text())
    eventually(lambda: not psutil.pid_exists(child) or not runs(psutil.Process(child)))


def test_part_gets_what_earlier_ones_have_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[float] = []

    def ran(part: Part, left_s: float) -> str:
        left.append(left_s)
        now_s[0] += part.share_s / 2
        return {"a": GOOD, "b": MISSED, "c": NOT_JUDGED, "d": TOO_LONG}[part.arguments[0]]

    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(abuse, "run", ran)
    monkeypatch.setattr(abuse, "PARTS", {f"part {name}": Part((name,), 40.0) for name in "abcd"})
    assert main([]) == 2
    assert left == [40.0, 60.0, 80.0, 100.0]
    assert "not judged" in capsys.readouterr().out
