"""The calls on a GPU, where there is none: bounds of pieces, verdicts, and goals."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu import minutes
from benchmarks.gpu.minutes import CALL_S_MAX, END_S, Piece, kernel_verdicts, pieces_of, run, verdicts_on

HANG = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
SLEEP = "import time; time.sleep(300)"


def test_a_piece_that_hangs_ends_with_what_it_started_in_another_session(tmp_path: Path) -> None:
    command = (sys.executable, "-c", f"{HANG}; {SLEEP}", SLEEP)
    assert run(command, 1.0, tmp_path / "hang.log", os.environ) == "TOO LONG"
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == [sys.executable, "-c", SLEEP]
        and process.status() != psutil.STATUS_ZOMBIE
        and time.time() - process.create_time() < 60
    ]
    assert not left


def test_status_and_last_line_are_the_verdict(tmp_path: Path) -> None:
    for status, verdict in ((0, "good"), (3, "MISSED")):
        piece = Piece("a piece", 30, (sys.executable, "-c", f"print('said'); raise SystemExit({status})"))
        (found,) = verdicts_on(piece, 30, tmp_path, os.environ, cpu=False)
        assert (found.verdict, found.figure.endswith("said")) == (verdict, True)


def test_pieces_that_cannot_run_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Piece("a piece", 30, ("never",))
    absent = replace(piece, needs="a-program-that-is-not-here")
    two = replace(piece, gpus=2)
    monkeypatch.setattr(minutes, "count_gpus", lambda: 1)
    for given, left_s, cpu, wanted in (
        (piece, 30, True, "needs a GPU"),
        (absent, 30, False, "needs a-program-that-is-not-here"),
        (two, 30, False, "needs 2 GPUs"),
        (piece, 0, False, "TOO LATE"),
    ):
        (found,) = verdicts_on(given, left_s, tmp_path, os.environ, cpu=cpu)
        assert found.verdict == wanted


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_the_bounds_of_a_call_are_within_its_time(call: int, tmp_path: Path) -> None:
    pieces, install_s = pieces_of(call, tmp_path), 60 if call == 1 else 0
    assert sum(piece.s_max for piece in pieces) + install_s <= CALL_S_MAX - END_S
    paths = [Path(word) for piece in pieces for word in piece.command if "tests/" in word]
    assert all((minutes.ROOT / path).exists() for path in paths)


def test_goals_of_kernels(tmp_path: Path) -> None:
    row = {"name": "x", "seconds": 1.0, "share": 0.85, "goal": 0.8, "peers": {"flashinfer": 0.6, "sdpa": 2.0}}
    beaten = {"name": "y", "seconds": 1.0, "share": 0.1, "goal": "peers", "peers": {"fla": 0.9}}
    (tmp_path / "gpu_kernels.json").write_text(json.dumps({"works": [row, beaten]}))
    verdicts = [(found.what, found.verdict) for found in kernel_verdicts(tmp_path)]
    assert verdicts == [("x", "reached"), ("x", "MISSED"), ("x", "figure"), ("y", "figure"), ("y", "MISSED")]
