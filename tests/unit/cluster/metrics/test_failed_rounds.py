"""Failed rounds of every process that repeats something reach the scrape."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster.fake_service import worker_status
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.exposition import exposition
from tidemill.cluster.metrics.scrape import scraped
from tidemill.kvstore.periodic import FAILED_ROUNDS

ROOT = Path(__file__).parents[4]

EDGE, ROUTER, SUPERVISOR, WORKER = "failed", "router_failed", "supervisor_failed", "worker_failed"
"""The metrics: EDGE is that of all processes of an endpoint, with and without edge processes of their own."""

TASKS = {
    "cluster/edge/cluster_service.py": {EDGE},
    "cluster/edge/failure_detector.py": {EDGE},
    "cluster/edge/records/store.py": {EDGE},
    "cluster/edge/requests/api_keys.py": {EDGE},
    "cluster/observability/worker_line.py": {EDGE},
    "cluster/processes/endpoint/batch_lane.py": {EDGE},
    "cluster/processes/endpoint/run_endpoint.py": {EDGE},
    "cluster/processes/frontends.py": {EDGE},
    "cluster/processes/joined_edge.py": {EDGE},
    "cluster/processes/joining/credentials.py": {EDGE},
    "cluster/processes/launch.py": {EDGE},
    "cluster/processes/publisher.py": {EDGE},
    "cluster/processes/scaling/scaler.py": {SUPERVISOR},
    "cluster/processes/supervisor.py": {SUPERVISOR},
    "cluster/router/server.py": {ROUTER},
    "cluster/rpc/router_failover.py": {EDGE, SUPERVISOR},
    "cluster/worker/heartbeats.py": {WORKER},
    "cluster/worker/worker_process.py": {WORKER},
    "kvstore/stores/circuit_breaker.py": {WORKER},
    "workers/vllm/engine.py": {WORKER},
}
"""The metrics of the processes that run what a file repeats."""


def test_every_file_that_repeats_something_has_its_metrics() -> None:
    parts = [path for part in ("cluster", "workers", "kvstore") for path in (ROOT / part).rglob("*.py")]
    repeat = [path for path in parts if re.search(r"(?<!def )\bevery\(", path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in repeat} == TASKS.keys()


@pytest.mark.parametrize(
    ("known", "seen"), [((None, None), None), ((0, None), 0), ((3, 3), 3), ((None, 2), 2)]
)
def test_scrape_has_the_counts_of_every_process(
    known: tuple[int | None, ...], seen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILED_ROUNDS, "a task", 4)
    worker = worker_status("decode-0")
    worker = replace(worker, load=replace(worker.load, counters={"failed_rounds": 5}))
    fleets = {
        f"model-{number}": FleetStatus(workers=(worker,), failed_rounds=6, supervisor_failed_rounds=count)
        for number, count in enumerate(known)
    }
    values = scraped(exposition(EdgeMetrics(lambda: 0.0), fleets).decode()).values
    counts = {
        name.removeprefix("tidemill:").removesuffix("_rounds_total"): values[name, labels]
        for name, labels in values
    }
    assert counts.get(SUPERVISOR) == seen
    assert (counts[ROUTER], counts[WORKER]) == (6, 5)
    assert values["tidemill:failed_rounds_total", frozenset({("task", "a task")})] == 4
