"""The alert rules: their metrics and runbooks exist, and the chart has the same rules."""

import re

import yaml

from tests.support.deploy.chart import CHART, ROOT, render, values_of

TEXT = (ROOT / "deploy/grafana/alerts.yaml").read_text()
RULES = yaml.safe_load(TEXT)["groups"][0]["rules"]
METRIC = re.compile(r"tidemill:\w+")


def test_metrics_of_alerts_and_their_labels_exist() -> None:
    rows = re.findall(
        r"^\| `(tidemill:\w+)`[^|]*\|([^|]*)\|[^|]*\|([^|]*)\|",
        (ROOT / "docs/metrics.md").read_text(),
        re.MULTILINE,
    )
    labels = {name: set(re.findall(r"`(\w+)`", named)) for name, _, named in rows}
    for name, kind, named in rows:
        if kind.strip() == "histogram":
            labels[f"{name}_bucket"] = {*re.findall(r"`(\w+)`", named), "le"}
    assert RULES
    for rule in RULES:
        names = METRIC.findall(rule["expr"])
        assert names
        assert not [name for name in names if name not in labels], rule["alert"]
        known = set[str]().union(*(labels[name] for name in names))
        used = set(re.findall(r"(\w+)=\"", rule["expr"]))
        for group in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            used |= {label.strip() for label in group.split(",")}
        assert used <= known, rule["alert"]


def test_each_alert_has_its_runbook() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    anchors = {
        f"docs/operations.md#{title.lower()}" for title in re.findall(r"^### (\w+)$", page, re.MULTILINE)
    }
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["annotations"]["runbook"] in anchors
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]


def test_chart_has_the_same_rules_on_demand() -> None:
    values = values_of(CHART.parent / "examples/cpu-only.yaml")
    [path] = [path for path in render(CHART, values) if path.endswith("prometheusrule.yaml")]
    assert not render(CHART, values)[path].strip()
    more = {"prometheusRule": {"enabled": True, "labels": {"release": "x"}}}
    made = yaml.safe_load(render(CHART, {**values, **more})[path])
    assert made["kind"] == "PrometheusRule"
    assert made["metadata"]["labels"]["release"] == "x"
    assert made["spec"]["groups"][0]["rules"] == RULES
