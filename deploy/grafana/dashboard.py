"""Generate tidemill.json: `python deploy/grafana/dashboard.py > deploy/grafana/tidemill.json`.

A row has a title and panels. A panel has a title, a Grafana unit, and queries with legends.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

MODEL = 'model_name=~"$model"'
WORKER = f'{MODEL},worker=~"$worker"'
RATE = "$__rate_interval"

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # (legend, expression)
    kind: str = "timeseries"
    stacked: bool = False


def quantiles(title: str, name: str, unit: str = "s") -> Panel:
    """Return a panel with the quantiles of a histogram for each selected model."""
    buckets = f"sum by (le, model_name) (rate(tidemill:{name}_bucket{{{MODEL}}}[{RATE}]))"
    queries = (
        (f"p{percent} {{{{model_name}}}}", f"histogram_quantile(0.{percent}, {buckets})")
        for percent in (50, 95, 99)
    )
    return Panel(title, unit, tuple(queries))


def heatmap(title: str, name: str, unit: str) -> Panel:
    query = f"sum by (le) (increase(tidemill:{name}_bucket{{{MODEL}}}[{RATE}]))"
    return Panel(title, unit, (("{{le}}", query),), kind="heatmap")


def rates(title: str, unit: str, by: str, *names: str, labels: str = MODEL) -> Panel:
    """Return a panel with the rates of counters, summed by a label. The rate is taken first, because the
    counters of a restarted worker begin at 0."""
    queries = (
        (
            f"{{{{{by}}}}}" + (f" {name}" if len(names) > 1 else ""),
            f"sum by ({by}) (rate(tidemill:{name}_total{{{labels}}}[{RATE}]))",
        )
        for name in names
    )
    return Panel(title, unit, tuple(queries))


def share(title: str, part: str, whole: str, by: str = "model_name", labels: str = MODEL) -> Panel:
    query = (
        f"sum by ({by}) (rate(tidemill:{part}_total{{{labels}}}[{RATE}]))"
        f" / sum by ({by}) (rate(tidemill:{whole}_total{{{labels}}}[{RATE}]))"
    )
    return Panel(title, "percentunit", ((f"{{{{{by}}}}}", query),))


def gauges(title: str, unit: str, legend: str, *names: str, labels: str = WORKER) -> Panel:
    queries = (
        (legend + (f" {name}" if len(names) > 1 else ""), f"tidemill:{name}{{{labels}}}") for name in names
    )
    return Panel(title, unit, tuple(queries))


def _rate(name: str) -> str:
    """Return the rate of a counter per worker."""
    return f"rate(tidemill:worker_{name}_total{{{WORKER}}}[{RATE}])"


MEMORY = Panel(
    "Memory by class",
    "bytes",
    (("{{class}}", f"sum by (class) (tidemill:worker_memory_bytes{{{WORKER}}})"),),
    stacked=True,
)
SPEED = Panel(
    "Transfer speed",
    "Bps",
    tuple(
        (f"{{{{worker}}}} {direction}", f"{_rate(num_bytes)} / {_rate(seconds)}")
        for direction, num_bytes, seconds in (
            ("in", "fetched_bytes", "fetch_seconds"),
            ("out", "published_bytes", "publish_seconds"),
        )
    ),
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Latency and errors",
        (
            quantiles("Time to first token", "time_to_first_token_seconds"),
            quantiles("Inter-token latency", "inter_token_latency_seconds"),
            quantiles("End-to-end latency", "e2e_request_latency_seconds"),
            quantiles("Time per output token", "request_time_per_output_token_seconds"),
            rates("Answers by finish reason", "reqps", "finished_reason", "request_success"),
            rates("Error replies", "reqps", "code", "request_errors", labels=""),
        ),
    ),
    (
        "Load",
        (
            gauges(
                "Requests",
                "short",
                "{{model_name}}",
                "num_requests_running",
                "num_requests_waiting",
                labels=MODEL,
            ),
            rates("Tokens", "short", "model_name", "prompt_tokens", "generation_tokens"),
            rates("Late first tokens", "reqps", "model_name", "late_first_tokens"),
            quantiles("Queue time", "request_queue_time_seconds"),
            quantiles("Prefill time", "request_prefill_time_seconds"),
            quantiles("Decode time", "request_decode_time_seconds"),
            quantiles("Prompt lengths", "request_prompt_tokens", "short"),
            quantiles("Answer lengths", "request_generation_tokens", "short"),
            gauges("Prompt work queued", "s", "{{worker}}", "worker_queued_seconds"),
        ),
    ),
    (
        "Prefixes",
        (
            share("Prefix cache hit rate", "prefix_cache_hits", "prefix_cache_queries"),
            share(
                "Prefix cache hit rate of the store",
                "external_prefix_cache_hits",
                "external_prefix_cache_queries",
            ),
            heatmap("Restorable hit depth", "request_restorable_hit_depth_tokens", "short"),
            rates("Computed prompt tokens by reason", "short", "reason", "computed_prompt_tokens"),
            rates("Replayed tail tokens", "short", "model_name", "replayed_tail_tokens"),
            rates(
                "Hits without a checkpoint",
                "short",
                "worker",
                "worker_kv_hit_without_state_tokens",
                labels=WORKER,
            ),
            rates(
                "Found and resumed tokens",
                "short",
                "worker",
                "worker_prefix_queried_tokens",
                "worker_prefix_found_tokens",
                "worker_prefix_resumed_tokens",
                labels=WORKER,
            ),
            gauges("Restorable depths", "short", "{{worker}}", "worker_restorable_depths"),
        ),
    ),
    (
        "Memory",
        (
            gauges("KV cache usage", "percentunit", "{{model_name}}", "kv_cache_usage_perc", labels=MODEL),
            MEMORY,
            gauges(
                "Budgets and memory demand",
                "bytes",
                "{{worker}}",
                "worker_memory_budget_bytes",
                "worker_wanted_bytes",
            ),
            rates("Preemptions", "short", "worker", "num_preemptions", labels=WORKER),
            rates("Evicted pages", "short", "reason", "worker_evicted_pages", labels=WORKER),
            rates("Evicted checkpoints", "short", "reason", "worker_evicted_checkpoints", labels=WORKER),
        ),
    ),
    (
        "Store",
        (
            rates(
                "Bytes moved",
                "Bps",
                "worker",
                "worker_fetched_bytes",
                "worker_published_bytes",
                labels=WORKER,
            ),
            SPEED,
            rates("Late fetches", "short", "worker", "worker_fetches_late", labels=WORKER),
            rates("Gets by outcome", "short", "outcome", "worker_store_gets", labels=WORKER),
            rates("Puts by outcome", "short", "outcome", "worker_store_puts", labels=WORKER),
            gauges("Store down", "bool", "{{worker}}", "worker_store_is_down"),
        ),
    ),
    (
        "Routes and workers",
        (
            rates(
                "Migrations and hand-overs", "short", "model_name", "request_migrations", "request_hand_overs"
            ),
            quantiles("Attempts", "request_attempts", "short"),
            gauges("Heartbeat age", "s", "{{worker}}", "worker_heard_ago_seconds"),
            gauges("Rows", "short", "{{worker}}", "worker_running_rows", "worker_waiting_rows"),
            rates(
                "Tokens by worker",
                "short",
                "worker",
                "worker_computed_tokens",
                "worker_generated_tokens",
                labels=WORKER,
            ),
            share(
                "Draft acceptance rate",
                "spec_decode_num_accepted_tokens",
                "spec_decode_num_draft_tokens",
                "worker",
                WORKER,
            ),
        ),
    ),
)


def dashboard() -> Json:
    panels: list[Json] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH * PER_ROW, "h": 1},
            }
        )
        y += 1
        for index, panel in enumerate(row):
            x, down = index % PER_ROW * WIDTH, index // PER_ROW * HEIGHT
            position = {"x": x, "y": y + down, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": position, **panel_json(panel)})
        y += -(-len(row) // PER_ROW) * HEIGHT
    return {
        "uid": "tidemill",
        "title": "Tidemill",
        "tags": ["tidemill"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                    "hide": 0,
                },
                variable("model", "label_values(tidemill:num_requests_running, model_name)"),
                variable("worker", f"label_values(tidemill:worker_running_rows{{{MODEL}}}, worker)"),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def panel_json(panel: Panel) -> Json:
    is_heatmap = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "format": "heatmap" if is_heatmap else "time_series",
        }
        for index, (legend, expression) in enumerate(panel.queries)
    ]
    lines: Json = {"lineWidth": 1, "fillOpacity": 40 if panel.stacked else 0, "showPoints": "never"}
    lines["stacking"] = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    options: Json = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if is_heatmap:
        options = {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
            "yAxis": {"axisPlacement": "left", "unit": panel.unit},
            "legend": {"show": True},
            "tooltip": {"mode": "single"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {} if is_heatmap else lines},
            "overrides": [],
        },
        "options": options,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
