"""The calls on a GPU, where there is none: bounds of pieces, verdicts, and goals."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu import minutes, sweep
from benchmarks.gpu.minutes import (
    CALL_S_MAX,
    END_S,
    FIRST_S_MAX,
    INSTALL_S_MAX,
    Piece,
    kernel_verdicts,
    pieces_of,
    run,
    verdicts_on,
)
from benchmarks.gpu.parcel import MIB_MAX, PARCEL_MIB_MAX, fitting, tracked_bytes
from benchmarks.gpu.works import Shape

from tests.support.waits import eventually
from tidemill.kernels.moe.tiles import ExpertTiles

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


@pytest.mark.parametrize("call", [0, 1, 2, 3, 4])
def test_the_bounds_of_a_call_are_within_its_time(call: int, tmp_path: Path) -> None:
    pieces, install_s = pieces_of(call, tmp_path), 0 if call else INSTALL_S_MAX
    most_s = (CALL_S_MAX if call else FIRST_S_MAX) - END_S
    assert sum(piece.s_max for piece in pieces if not piece.beside) + install_s <= most_s
    assert all(piece.s_max < most_s for piece in pieces)
    paths = [Path(word) for piece in pieces for word in piece.command if "tests/" in word]
    assert all((minutes.ROOT / path).exists() for path in paths)


def test_the_checkout_leaves_room_for_the_parcel() -> None:
    assert fitting(PARCEL_MIB_MAX << 20, tracked_bytes())
    with pytest.raises(SystemExit, match="more than 50"):
        fitting(MIB_MAX << 20, 1)


PIECES = """
import sys, time
from pathlib import Path
from benchmarks.gpu import minutes, sweep
from benchmarks.gpu.minutes import Piece

def python(text):
    return (sys.executable, "-c", text)

def pieces_of(call, folder):
    after = str(folder / "after")
    wait = f"import time, pathlib\\nwhile not pathlib.Path({after!r}).exists(): time.sleep(0.05)"
    return [
        Piece("beside", 30, python(wait), python(wait), beside=True),
        Piece("breaks", 30, *[python("print('FAILED here'); raise SystemExit(1)")] * 2),
        Piece("after", 30, *[python(f"open({after!r}, 'w')")] * 2),
        Piece("last", 60, *[python("print('begun', flush=True); import time; time.sleep(60)")] * 2),
    ]

minutes.pieces_of = pieces_of
sys.exit(minutes.main())
"""


def test_verdicts_fall_one_by_one_and_a_call_that_is_cut_leaves_all_output(tmp_path: Path) -> None:
    """A piece beside others ends after them, one that breaks stops none, and SIGTERM comes amid the last."""
    archive = tmp_path / "all.tar.gz"
    options = ("0", "--folder", tmp_path / "pieces", "--archive", archive, "--device", "cpu")
    command = (sys.executable, "-c", PIECES, *map(str, options))
    call = subprocess.Popen(command, cwd=minutes.ROOT, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    with call:
        assert call.stdout is not None
        for line in call.stdout:
            lines.append(line)
            if sum(" good" in line for line in lines) == 2:
                break
        log = tmp_path / "pieces/last.log"
        eventually(lambda: log.exists() and "begun" in log.read_text())
        call.terminate()
        assert call.wait(20) == 128 + signal.SIGTERM
    assert next(line.split()[0] for line in lines if line[0] != " ") == "breaks"
    assert "    FAILED here\n" in lines
    with tarfile.open(archive) as found:
        names = found.getnames()
        last = found.extractfile("last.log")
        assert last is not None
        assert b"begun" in last.read()
    assert names == ["after.log", "beside.log", "breaks.log", "call-0.json", "last.log"]
    verdicts = {
        row["what"]: row["verdict"] for row in json.loads((tmp_path / "pieces/call-0.json").read_text())
    }
    assert verdicts == {"breaks": "MISSED", "after": "good", "beside": "good"}


def test_goals_of_kernels(tmp_path: Path) -> None:
    row = {"name": "x", "seconds": 1.0, "share": 0.85, "goal": 0.8, "peers": {"flashinfer": 0.6, "sdpa": 2.0}}
    beaten = {"name": "y", "seconds": 1.0, "share": 0.1, "goal": "peers", "peers": {"fla": 0.9}}
    (tmp_path / "gpu_kernels.json").write_text(json.dumps({"works": [row, beaten]}))
    verdicts = [(found.what, found.verdict) for found in kernel_verdicts(tmp_path)]
    assert verdicts == [("x", "reached"), ("x", "MISSED"), ("x", "figure"), ("y", "figure"), ("y", "MISSED")]


def test_sweep_fills_the_table_of_tiles() -> None:
    """Both products share the tokens of a tile, and nothing else."""

    def timed(tokens: int, sizes: tuple[int, int, int, int, int], gate_up: float, down: float) -> sweep.Timed:
        return sweep.Timed(tokens, sweep.Tiling(*sizes), {"gate_up": gate_up, "down": down})

    found = [
        timed(32, (16, 64, 64, 4, 3), 2.0, 1.0),
        timed(32, (16, 128, 64, 4, 4), 1.0, 3.0),
        timed(32, (32, 64, 64, 4, 4), 0.9, 1.5),
        timed(512, (64, 128, 128, 8, 3), 1.0, 1.0),
        timed(512, (32, 64, 64, 4, 4), 0.5, 1.6),
    ]
    shape = Shape(experts=512, top_k=10)
    assert sweep.table(found, shape) == [
        ExpertTiles(2.5, 16, (128, 64, 4, 4), (64, 64, 4, 3)),
        ExpertTiles(None, 64, (128, 128, 8, 3), (128, 128, 8, 3)),
    ]
