"""docs/metrics.md lists all metrics and is current."""

import re
from pathlib import Path

from tests.support.cluster.fake_service import worker_status
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.exposition import exposition
from tidemill.cluster.metrics.reference import reference, scraped_name
from tidemill.cluster.metrics.worker_metrics import COUNTERS, SPLIT, STATES

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
    families: set[str] = {beginnings.get(name) or name for name in counted}
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
