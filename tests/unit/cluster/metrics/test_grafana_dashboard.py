"""The Grafana dashboard is current, and asks for metrics, labels and buckets that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tidemill.cluster.metrics.reference import reference
from tidemill.cluster.metrics.specs import EDGE, STATE_OF_MODELS
from tidemill.cluster.metrics.worker_metrics import COUNTERS, GAUGES, MEMORY, STATES, metric_name

FOLDER = Path(__file__).parents[4] / "deploy" / "grafana"

NAMED = (*EDGE, *STATE_OF_MODELS, MEMORY, *STATES.values(), *(spec for spec, _ in GAUGES))
LABELS = {
    **{spec.full_name: {*spec.labels} for spec in NAMED},
    **{f"tidemill:{metric_name(counted)}": {*spec.labels} for counted, spec in COUNTERS.items()},
}


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "tidemill.json").read_text())


def expressions() -> list[str]:
    return [
        target["expr"]
        for panel in dashboard()["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


def test_it_is_current() -> None:
    made = subprocess.run(
        [sys.executable, FOLDER / "dashboard.py"], capture_output=True, text=True, check=True
    )
    assert made.stdout == (FOLDER / "tidemill.json").read_text(), (
        "run `python deploy/grafana/dashboard.py > deploy/grafana/tidemill.json`"
    )


def test_every_metric_it_asks_for_exists() -> None:
    page = reference()
    asked = [name for text in expressions() for name in re.findall(r"tidemill:\w+", text)]
    assert len(set(asked)) > 40
    histograms = {spec.full_name for spec in EDGE if spec.kind == "histogram"}
    for name in asked:
        base = name.removesuffix("_bucket")
        assert base in histograms if name.endswith("_bucket") else f"| `{name}`" in page, name


def test_every_label_it_asks_for_is_there() -> None:
    for text in expressions():
        names = [re.sub(r"_(bucket|total)$", "", name) for name in re.findall(r"tidemill:\w+", text)]
        wanted = set(re.findall(r'(\w+)=~?"', text))
        wanted |= {label for by in re.findall(r"by \(([^)]*)\)", text) for label in by.split(", ")}
        for name in names:
            assert wanted - {"le"} <= LABELS[name], (text, name)


def test_counters_are_summed_after_their_rate() -> None:
    for text in expressions():
        assert not re.search(r"(rate|increase)\(sum", text)
        for name in re.findall(r"tidemill:\w+_total", text):
            assert f"rate({name}" in text, text


def test_panels_have_places_and_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not taken & cells
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_files_beside_the_dashboard_are_readable() -> None:
    scrapes = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert scrapes[0]["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    for path in (FOLDER / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
