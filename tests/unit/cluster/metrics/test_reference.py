"""docs/metrics.md lists all metrics and is current; the Grafana dashboard asks for those that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.cluster.fake_service import worker_status
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.exposition import exposition
from tidemill.cluster.metrics.reference import reference, scraped_name
from tidemill.cluster.metrics.specs import EDGE, STATE_OF_MODELS
from tidemill.cluster.metrics.worker_metrics import COUNTERS, GAUGES, MEMORY, SPLIT, STATES, spec_of
from tidemill.workers.vllm.metrics import COUNTERS as OF_VLLM

ROOT = Path(__file__).parents[4]


def listed() -> set[str]:
    return set(re.findall(r"^\| `([a-z0-9_:]+)`", reference(), re.MULTILINE))


def test_page_is_current() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == reference(), "run `make metrics-doc`"


def test_every_counter_of_workers_is_explained() -> None:
    sources = [path.read_text() for part in ("kvstore", "workers") for path in (ROOT / part).rglob("*.py")]
    counted = {name for text in sources for name in re.findall(r'counters\[f?"([a-z_]+)', text)}
    counted |= set(
        re.findall(
            r'f?"([a-z_]+)(?:\{outcome.value\}|\{rank\})?": ',
            (ROOT / "workers/engine/load_report.py").read_text(),
        )
    )
    beginnings = {prefix + separator: prefix for prefix, separator in SPLIT.items()}
    families: set[str] = {beginnings.get(name) or name for name in counted} | {*OF_VLLM.values()}
    assert len(families) > 15
    known = COUNTERS.keys() | STATES.keys()
    stray = {name for name in families - known if not name.startswith(tuple(beginnings))}
    assert not stray
    assert not known - families, "these are no longer counted"


def test_scraped_metrics_are_listed() -> None:
    metrics = EdgeMetrics(lambda: 0.0)
    metrics.of_model("keeper")
    text = exposition(metrics, {"keeper": FleetStatus(workers=(worker_status("decode-0"),))}).decode()
    scraped = set(re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", text, re.MULTILINE))
    unknown = {"tidemill:worker_pages_published_total"}  # the fake's, of a worker newer than the edge
    assert {name for name in scraped if not name.endswith("_created")} - unknown <= listed()


def test_names_end_in_their_units() -> None:
    for name in listed():
        assert name.startswith("tidemill:")
        assert not name.endswith(("_ms", "_us", "_s", "_mb")), "base units"
    assert scraped_name(COUNTERS["fetched_bytes"]).endswith("_total")


def test_operations_page_names_existing_metrics() -> None:
    names = set(re.findall(r"`(tidemill:[a-z0-9_]+)", (ROOT / "docs" / "operations.md").read_text()))
    assert len(names) > 15
    assert not [name for name in names if f"| `{name}`" not in reference()]


FOLDER = Path(__file__).parents[4] / "deploy" / "grafana"

NAMED = (*EDGE, *STATE_OF_MODELS, MEMORY, *STATES.values(), *GAUGES, *map(spec_of, COUNTERS))
LABELS = {spec.full_name: {*spec.labels} for spec in NAMED}


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
