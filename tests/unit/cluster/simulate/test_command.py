"""`tidemill simulate` as an operator calls it."""

import json
import sys
from pathlib import Path

import pytest

from tests.unit.cluster.simulate.test_trace import line
from tidemill.cluster.cli.main import EXIT_REFUSED, main
from tidemill.cluster.simulate.command import read_speed
from tidemill.cluster.simulate.cost import SPEED
from tidemill.cluster.simulate.trace import TraceError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [line(100 * number, 3000, 40, [number % 3, 50, 51, 52, 53, 60 + number]) for number in range(20)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("engine", ["real", "model"])
def test_simulate_prints_json_and_writes_a_plot(
    trace: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = trace.with_suffix(".png")
    arguments = ["simulate", str(trace), "--prefill=2", "--decode=1", f"--engine={engine}", "--json"]
    assert main([*arguments, f"--plot={plot}"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["refused"], figures["failed"]) == (20, 0, 0)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_simulate_refuses_a_plot_that_cannot_be_drawn_or_written(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("nowhere/run.png", "run.nothing"):
        options = ["--engine=model", "--requests=3", f"--plot={trace.parent / name}"]
        assert main(["simulate", str(trace), *options]) == EXIT_REFUSED
        assert f"{name}: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot = trace.with_suffix(".png")
    assert main(["simulate", str(trace), "--engine=model", f"--plot={plot}"]) == EXIT_REFUSED
    printed = capsys.readouterr()
    assert "pip install 'tidemill[plot]'" in printed.err
    assert (printed.out, plot.exists()) == ("", False), "it was refused before the simulation"


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--policy=worst", "the policies are ours"),
        ("--prefill=0", "--prefill is 0"),
        ("--speed-up=0", "--speed-up is 0"),
        ("--grain=3", "--grain is 3"),
        ("--memory=1", "--memory is 1"),
        ("--store-rate=0", "through the store"),
    ],
)
def test_simulate_refuses_impossible_options(
    trace: Path, option: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), option]) == EXIT_REFUSED
    assert reason in capsys.readouterr().err


def test_speed_file_overrides_the_measured_fields(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text('{"step_s": 0.5, "row_s": 0}')
    assert (read_speed(path).step_s, read_speed(path).row_s) == (0.5, SPEED.row_s)
    for text in ("", "[]", "{}", '{"speed": 1}'):
        path.write_text(text)
        with pytest.raises(TraceError, match="is not a speed file"):
            read_speed(path)


def test_simulate_by_many_routers_serves_every_copy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight views that are late duplicate families; requests of one family at one router do not."""
    hits: list[float] = []
    fleet = ["--routers=8", "--edges=8", "--copies=3", "--speed-up=20"]
    options = [*fleet, "--engine=model", "--store-rate=0", "--json"]
    for spread in ("edge", "family"):
        assert main(["simulate", str(trace), *options, f"--spread={spread}"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["requests"], figures["failed"]) == (60, 0)
        hits.append(figures["hit_ratio"])
    assert hits[0] < hits[1]
