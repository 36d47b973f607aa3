"""What Prometheus reads: the edge's own measurements, and each worker's report at the time of the scrape."""

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tidemill.cluster.admission import TTFT_S_MAX
from tidemill.cluster.autoscale import Misses
from tidemill.cluster.http.answers import Increment
from tidemill.cluster.http.replies import cached_tokens
from tidemill.cluster.service import FleetStatus, WorkerStatus
from tidemill.workers.messages import Request

PREFIX = "tidemill:"
TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
ITL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)

REFUSED = (429, 503)
"""How those end that found no place: what a larger fleet would have served."""

WORKER_GAUGES: dict[str, tuple[str, Callable[[WorkerStatus], float]]] = {
    "queued_tokens": ("Prompt tokens not yet computed.", lambda status: status.load.queued_tokens),
    "queued_seconds": ("How long these will take.", lambda status: status.load.queued_s),
    "running_rows": ("Sequences in the running batch.", lambda status: status.load.running_rows),
    "waiting_rows": ("Sequences that wait for memory.", lambda status: status.load.waiting_rows),
    "memory_budget_bytes": ("Memory that it may take.", lambda status: status.load.budget_bytes),
    "wanted_bytes": ("Memory that its waiting requests need.", lambda status: status.load.wanted_bytes),
    "state_slots": ("States that running sequences hold.", lambda status: status.load.state_slots),
    "restorable_depths": ("Prefixes that the worker can resume.", lambda status: status.restorable_depths),
    "heard_ago_seconds": ("Time since the last heartbeat.", lambda status: status.heard_ago_s),
}

SPLIT = {
    "evicted_pages": ("_for_", "reason"),
    "evicted_checkpoints": ("_for_", "reason"),
    "store_puts": ("_as_", "outcome"),
    "store_gets": ("_as_", "outcome"),
}
"""Workers count these for each value of a label by itself: `evicted_pages_for_resize`."""

STATES = {"store_is_down": "Whether the page store is left alone for now: it was down or late."}
"""Not counted, but true or false now."""

KNOWN_NAMES = {
    "spec_drafted_tokens": "spec_decode_num_draft_tokens",
    "spec_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_trials": "spec_decode_num_drafts",
}
"""Counters of workers that have a name which operators of vLLM know."""


class Metrics:
    """Instruments of one edge. Labels come from fixed sets: status codes, finish reasons, worker names."""

    def __init__(self, clock: Callable[[], float], ttft_s_max: float = TTFT_S_MAX) -> None:
        """A first token is late after `ttft_s_max`, or after the deadline of its own request."""
        self._clock = clock
        self._ttft_s_max = ttft_s_max
        self._misses = Misses()
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self.ttft_s = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", TTFT_BUCKETS_S
        )
        self.itl_s = histogram(
            "inter_token_latency_seconds", "Between the tokens of an answer.", ITL_BUCKETS_S
        )
        self.e2e_s = histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", E2E_BUCKETS_S
        )
        self.running = Gauge(PREFIX + "num_requests_running", "Answers being made.", registry=registry)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers that started.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.success = counter("request_success", "Answers by how they ended.", ["finished_reason"])
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens that did not have to be computed.")
        self.errors = counter("request_errors", "Error replies by HTTP status.", ["code"])
        self.late = counter("late_first_tokens", "First tokens that came after their deadline.")

    @property
    def misses(self) -> Misses:
        """Totals since the start, of what was asked for and of what was not had in time."""
        return self._misses

    def count_error(self, status: int) -> None:
        self.errors.labels(code=str(status)).inc()
        if status in REFUSED:
            self._misses = replace(self._misses, refused=self._misses.refused + 1)

    def saw_first(self, request: Request, ttft_s: float) -> None:
        self.ttft_s.observe(ttft_s)
        deadline_s = self._ttft_s_max if request.ttft_s_max is None else request.ttft_s_max
        is_late = ttft_s > min(deadline_s, self._ttft_s_max)
        self.late.inc(is_late)
        self._misses = replace(
            self._misses, answered=self._misses.answered + 1, late=self._misses.late + is_late
        )

    @contextmanager
    def watch(self, requests: Sequence[Request]) -> Generator["Watch"]:
        """Measures the answers to `requests`, from now to the end of the block, whatever ends it."""
        watch = Watch(self, requests, self._clock)
        self.running.inc(len(requests))
        try:
            yield watch
        finally:
            self.running.dec(len(requests))
            for _ in range(watch.unfinished):
                self.success.labels(finished_reason="abort").inc()


class Watch:
    """The times of one HTTP request."""

    def __init__(self, metrics: Metrics, requests: Sequence[Request], clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._requests = requests
        self._clock = clock
        self._start_s = clock()
        self._last_s: dict[int, float] = {}
        self.unfinished = len(requests)

    def saw(self, increment: Increment) -> None:
        now_s = self._clock()
        metrics = self._metrics
        last_s = self._last_s.get(increment.choice)
        num_new = increment.growth.num_tokens
        if last_s is None:
            request = self._requests[increment.choice]
            num_tokens = len(request.tokens)
            metrics.saw_first(request, now_s - self._start_s)
            metrics.prompt_tokens.inc(num_tokens)
            metrics.prefix_queries.inc(num_tokens)
            metrics.prefix_hits.inc(cached_tokens(num_tokens, increment.trace))
        elif num_new:
            for _ in range(num_new):
                metrics.itl_s.observe((now_s - last_s) / num_new)
        self._last_s[increment.choice] = now_s
        metrics.generation_tokens.inc(num_new)
        finish = increment.growth.finish
        if finish:
            self.unfinished -= 1
            metrics.e2e_s.observe(now_s - self._start_s)
            metrics.success.labels(finished_reason=finish).inc()


class _FleetCollector:
    """The workers' reports as metric families."""

    def __init__(self, status: FleetStatus) -> None:
        self._workers = status.workers

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}worker_{name}", text, labels=["worker", "role"])
            for status in self._workers:
                gauge.add_metric([status.info.name, status.info.role], read(status))
            yield gauge
        yield self._memory()
        yield from self._counters()

    def _memory(self) -> Metric:
        labels = ["worker", "role", "class"]
        gauge = GaugeMetricFamily(f"{PREFIX}worker_memory_bytes", "Memory by what it holds.", labels=labels)
        for status in self._workers:
            for name, num_bytes in asdict(status.load.memory).items():
                gauge.add_metric([status.info.name, status.info.role, name], num_bytes)
        return gauge

    def _counters(self) -> Iterator[Metric]:
        families: defaultdict[str, list[tuple[WorkerStatus, str, float]]] = defaultdict(list)
        for status in self._workers:
            for counted, value in status.load.counters.items():
                name, part = _family(re.sub(r"[^a-zA-Z0-9_]", "_", counted))
                families[name].append((status, part, value))
        for name, samples in sorted(families.items()):
            labels = ["worker", "role", *SPLIT.get(name, ())[1:]]
            full_name = PREFIX + KNOWN_NAMES.get(name, f"worker_{name}")
            family = (
                GaugeMetricFamily(full_name, STATES[name], labels=labels)
                if name in STATES
                else CounterMetricFamily(full_name, "Counted by the worker since its start.", labels=labels)
            )
            for status, part, value in samples:
                values = [status.info.name, status.info.role, part]
                family.add_metric(values[: len(labels)], value)
            yield family


def _family(counted: str) -> tuple[str, str]:
    """The metric of a counter, and the part of it that its name says."""
    for name, (separator, _) in SPLIT.items():
        if counted.startswith(name + separator):
            return name, counted.removeprefix(name + separator)
    return counted, ""


def exposition(metrics: Metrics, fleet: FleetStatus | None) -> bytes:
    """The text that Prometheus scrapes; without the workers while the router does not answer."""
    text = generate_latest(metrics.registry)
    if fleet is not None:
        workers = CollectorRegistry(auto_describe=False)
        workers.register(_FleetCollector(fleet))
        text += generate_latest(workers)
    return text
