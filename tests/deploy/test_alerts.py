"""The alert rules: they fire, their metrics and runbooks exist, and the chart has the same rules."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
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


PROMTOOL = shutil.which("promtool")
MODEL = 'model_name="keeper"'
WORKER = f'{MODEL},worker="decode-0",role="decode"'
SERVER_UP = {f"tidemill:num_requests_running{{{MODEL}}}": "_x4 0x200"}
EVENTS = {
    "TidemillSilent": {},
    "TidemillNoWorker": {'tidemill:request_errors_total{code="503"}': "_x4 0x8 1+1x100"},
    "TidemillErrors": {'tidemill:request_errors_total{code="500"}': "_x4 0x8 1+1x100"},
    "TidemillOverload": {
        'tidemill:request_errors_total{code="429"}': "_x4 0x8 1+1x100",
        f'tidemill:request_success_total{{{MODEL},finished_reason="stop"}}': "_x4 0x8 10+10x100",
    },
    "TidemillSlowFirstToken": {
        f'tidemill:time_to_first_token_seconds_bucket{{{MODEL},le="10.0"}}': "_x4 0x108",
        f'tidemill:time_to_first_token_seconds_bucket{{{MODEL},le="20.0"}}': "_x4 0x8 1+1x100",
        f'tidemill:time_to_first_token_seconds_bucket{{{MODEL},le="+Inf"}}': "_x4 0x8 1+1x100",
    },
    "TidemillPreemptions": {f"tidemill:num_preemptions_total{{{WORKER}}}": "_x4 0x8 9+9x100"},
    "TidemillWorkerUnheard": {f"tidemill:worker_heard_ago_seconds{{{WORKER}}}": "_x4 1x8 6+15x20"},
    "TidemillMigrations": {f"tidemill:request_migrations_total{{{MODEL}}}": "_x4 0x8 12x100"},
    "TidemillStoreDown": {f"tidemill:worker_store_is_down{{{WORKER}}}": "_x4 0x8 1x100"},
    # The violation ends the worker, which has no row until it has started again.
    "TidemillOwnershipViolation": {
        f"tidemill:worker_ownership_violations_total{{{WORKER}}}": "_x4 0x8 _x4 1x100"
    },
}
"""The events of each alert: values every 15 s of series that begin a minute after Prometheus."""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing")
def test_each_alert_fires_for_a_series_that_is_born_late_and_only_then(tmp_path: Path) -> None:
    assert EVENTS.keys() == {rule["alert"] for rule in RULES}
    calm = {series: re.sub(r" [1-9].*", " 0x200", values) for series, values in _all(EVENTS).items()}
    calm[f"tidemill:worker_heard_ago_seconds{{{WORKER}}}"] = "_x4 1x200"
    cases = [_case(None, SERVER_UP | calm)]
    for alert, events in EVENTS.items():
        cases.append(_case(alert, events if alert == "TidemillSilent" else SERVER_UP | events))
    test = {
        "rule_files": [str(ROOT / "deploy/grafana/alerts.yaml")],
        "evaluation_interval": "15s",
        "tests": cases,
    }
    path = tmp_path / "alerts.json"
    path.write_text(json.dumps(test))
    ran = subprocess.run([str(PROMTOOL), "test", "rules", path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _all(events: dict[str, dict[str, str]]) -> dict[str, str]:
    return {series: values for of_alert in events.values() for series, values in of_alert.items()}


def _case(alert: str | None, events: dict[str, str]) -> dict[str, object]:
    """Return a test of Prometheus' rules: `alert` alone has fired within 25 minutes."""
    fired = 'count by (alertname) (last_over_time(ALERTS{alertstate="firing"}[25m]))'
    samples = [] if alert is None else [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    return {
        "interval": "15s",
        "input_series": [{"series": series, "values": values} for series, values in events.items()],
        "promql_expr_test": [{"expr": fired, "eval_time": "25m", "exp_samples": samples}],
    }
