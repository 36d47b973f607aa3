"""The benchmark of the engine on a GPU, where there is none: it runs, and takes a model that fits."""

import json
from pathlib import Path

import pytest
from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu.engine import LAYER, Plan, layers_for, main, memory_for

from tidemill.workers.models.architectures.config import weight_bytes

pytestmark = pytest.mark.slow


def test_command_leaves_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tiny", "--folder", str(tmp_path)])
    found = json.loads((tmp_path / "gpu_engine.json").read_text())
    names = [step["name"] for step in found["steps"]]
    assert names == [
        "prompt 1 x 70 after 0",
        "decode, eager 1 x 1 after 70",
        "decode, graphs 1 x 1 after 70",
        "decode, top-p 1 x 1 after 70",
        "decode, eager 3 x 1 after 70",
        "decode, graphs 3 x 1 after 70",
        "decode, top-p 3 x 1 after 70",
        "guesses of 2, 1 x 3 after 70",
        "prompt of 5 beside 2 x 1 after 70",
        "tail of 1 beside 3 x 1 after 70",
        "decode, tables of 640 3 x 1 after 70",
        "decode, async 1 x 1 after 70",
        "decode, async 3 x 1 after 70",
    ]
    assert all(step["seconds"] > 0 for step in found["steps"])
    assert [step["goal"] for step in found["steps"] if "1 x 1" in step["name"]] == [None, 0.6, 0.6, None]
    output = capsys.readouterr().out
    assert names[0] in output
    assert "decode 3 x 1: " in output
    assert "x aten::" in output  # what a step spends most on


@pytest.mark.parametrize("free_gib", [40, 80, 139, 200])
def test_as_many_layers_as_fit(free_gib: int) -> None:
    plan = Plan(layer=LAYER)
    layers = layers_for(plan, free_gib << 30)
    assert 4 <= layers <= 48
    assert not layers % 4
    layout, pages, states = memory_for(plan, plan.config(layers))
    taken = weight_bytes(plan.config(layers), "bfloat16") + (pages + states) * layout.extent_bytes
    assert taken + gpu_engine.SPARE_BYTES <= free_gib << 30
    # what one of three linear layers and one of attention takes: 3.3 GB of weights each, and their memory
    assert layers == 48 or taken + gpu_engine.SPARE_BYTES + (20 << 30) > free_gib << 30


def test_it_does_not_begin_where_nothing_fits() -> None:
    with pytest.raises(SystemExit, match="four layers do not fit"):
        layers_for(Plan(layer=LAYER), 8 << 30)
