"""Measure answers at the edge, as they pass. Labels are from fixed sets: models, statuses."""

import math
from bisect import bisect_left
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from tidemill.cluster.messages import Misses
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.specs import EDGE, MODEL, Collected, Spec
from tidemill.cluster.observability.telemetry import MetricsAlias
from tidemill.kvstore.periodic import FAILED_ROUNDS
from tidemill.workers.cache_lookup import MISS_REASONS
from tidemill.workers.messages import Overloaded, Request, Trace, Unserved


class EdgeMetrics:
    """The instruments of one edge, and the targets that its answers missed."""

    def __init__(
        self,
        clock: Callable[[], float],
        ttft_s_max: Mapping[str, float] | None = None,
        alias: MetricsAlias | None = None,
    ) -> None:
        """Create the instruments, and the counters of rare events at 0: a series that is born at 1 has no
        increase. A first token is late after its model's `ttft_s_max`, or after the deadline of its own
        request. `alias` is the engine whose metric names are added."""
        self.alias: MetricsAlias | None = alias
        self._clock = clock
        self._ttft_s_max = ttft_s_max or {}
        self._misses = defaultdict[str, Misses](Misses)
        self._by_model: dict[str, ModelMetrics] = {}
        self.under_way = Count[str]()  # open answers, by model
        self.registry = registry = CollectorRegistry()
        self._histograms = {
            spec: Histogram(spec.full_name, spec.text, spec.labels, buckets=spec.buckets, registry=registry)
            for spec in EDGE
            if spec.kind == "histogram" and spec is not specs.ITL
        }
        self._counters = {
            spec: Counter(spec.full_name, spec.text, spec.labels, registry=registry)
            for spec in EDGE
            if spec.kind == "counter" and spec is not specs.GENERATION_TOKENS
        }
        registry.register(Collected(partial(_per_token, self._by_model)))
        for status in specs.STATUSES:
            self._counters[specs.ERRORS].labels(code=str(status))
        for model in self._ttft_s_max:
            self.of_model(model)
        registry.register(Collected(_failed_rounds))

    def misses(self, model: str) -> Misses:
        """Return totals since the start: the requests to this model, and those that were refused or late."""
        return self._misses[model]

    def open_requests(self, model: str) -> int:
        """Return the number of requests to this model whose answers are not complete."""
        return self.under_way[model]

    def count_error(self, status: int) -> None:
        self._counters[specs.ERRORS].labels(code=str(status)).inc()

    def count_end(self, model: str, reason: str, count: int = 1) -> None:
        self._counters[specs.SUCCESS].labels(model_name=model, finished_reason=reason).inc(count)

    def of_model(self, model: str) -> "ModelMetrics":
        """Return the instruments of one model. `model` is a configured name, never one from a client."""
        found = self._by_model.get(model)
        if found is None:
            found = self._by_model[model] = ModelMetrics(self._histograms, self._counters, model)
            self.under_way[model] += 0
            for reason in specs.FINISH_REASONS:
                self._counters[specs.SUCCESS].labels(model_name=model, finished_reason=reason)
        return found

    def record_refusal(self, model: str) -> None:
        misses = self._misses[model]
        self._misses[model] = replace(misses, refused=misses.refused + 1)

    def record_first_token(self, model: str, request: Request, ttft_s: float) -> None:
        most_s = self._ttft_s_max.get(model, math.inf)
        is_late = ttft_s > min(most_s if request.ttft_s_max is None else request.ttft_s_max, most_s)
        self.of_model(model).count(specs.LATE, is_late)
        misses = self._misses[model]
        self._misses[model] = replace(misses, answered=misses.answered + 1, late=misses.late + is_late)

    @contextmanager
    def watch(self, model: str, requests: Sequence[Request]) -> Generator["RequestMetrics"]:
        """Measure the answers to `requests`, from now to the end of the block, however it ends."""
        watch = RequestMetrics(self, model, requests, self._clock)
        self.under_way[model] += len(requests)
        try:
            yield watch
        except (Overloaded, Unserved):
            self.record_refusal(model)
            raise
        finally:
            self.under_way[model] -= len(requests)
            if watch.unfinished:
                self.count_end(model, "abort", watch.unfinished)


class ModelMetrics:
    """The instruments of one model, whose label is bound once, and plain numbers for what every token
    changes."""

    def __init__(
        self, histograms: Mapping[Spec, Histogram], counters: Mapping[Spec, Counter], model: str
    ) -> None:
        self._histograms = {
            spec: histogram.labels(model_name=model) for spec, histogram in histograms.items()
        }
        self._counters = {
            spec: counter.labels(model_name=model)
            for spec, counter in counters.items()
            if spec.labels == (MODEL,)
        }
        computed = counters[specs.COMPUTED]
        self.computed = {reason: computed.labels(model_name=model, reason=reason) for reason in MISS_REASONS}
        self.num_tokens = 0
        self.gaps = [0] * (len(specs.ITL.buckets) + 1)  # times between tokens by bucket, the last unbounded
        self.gaps_s = 0.0  # their sum

    def count_tokens(self, number: int, after_s: float | None) -> None:
        """Count tokens that came together, `after_s` seconds after those before them. None: the first."""
        self.num_tokens += number
        if after_s is not None and number:
            self.gaps[bisect_left(specs.ITL.buckets, after_s / number)] += number
            self.gaps_s += after_s

    def observe(self, spec: Spec, value: float) -> None:
        self._histograms[spec].observe(value)

    def count(self, spec: Spec, number: float = 1) -> None:
        self._counters[spec].inc(number)


def _per_token(by_model: Mapping[str, ModelMetrics]) -> Iterator[Metric]:
    """Make samples of the plain numbers when they are scraped."""
    yield specs.GENERATION_TOKENS.family(([name], counted.num_tokens) for name, counted in by_model.items())
    gaps = HistogramMetricFamily(specs.ITL.full_name, specs.ITL.text, labels=specs.ITL.labels)
    bounds = [*(str(float(bound)) for bound in specs.ITL.buckets), "+Inf"]
    for model, counted in by_model.items():
        totals = list(zip(bounds, accumulate(counted.gaps), strict=True))
        gaps.add_metric([model], totals, counted.gaps_s)
    yield gaps


def _failed_rounds() -> Iterator[Metric]:
    yield specs.FAILED_ROUNDS.family(([task], count) for task, count in FAILED_ROUNDS.items())


class _Times:
    def __init__(self, now_s: float, trace: Trace, queue_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.trace = trace
        self.queue_s = queue_s
        self.num_tokens = 0


class RequestMetrics:
    """The times of the answers to one HTTP request."""

    def __init__(
        self, metrics: EdgeMetrics, model: str, requests: Sequence[Request], clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._of_model = metrics.of_model(model)
        self._requests = requests
        self._clock = clock
        self._start_s = clock()
        self._times: dict[int, _Times] = {}
        self.unfinished = len(requests)

    def record(self, choice: int, *, num_tokens: int, finish: str | None, trace: Trace) -> None:
        """Record `num_tokens` more tokens of this choice; they are the last if there is a `finish`."""
        now_s = self._clock()
        times = self._times.get(choice)
        if times is None:
            queue_s = self._record_first(self._requests[choice], trace, now_s - self._start_s)
            times = self._times[choice] = _Times(now_s, trace, queue_s)
            self._of_model.count_tokens(num_tokens, None)
        else:
            self._of_model.count_tokens(num_tokens, now_s - times.last_s)
        if trace is not times.trace:
            self._record_route(trace)
            times.trace = trace
        times.last_s = now_s
        times.num_tokens += num_tokens
        if finish:
            self.unfinished -= 1
            self._metrics.count_end(self._model, finish)
            self._record_last(times, now_s)

    def _record_first(self, request: Request, trace: Trace, ttft_s: float) -> float:
        """Record the first token, and return how much of its time the request waited."""
        of_model, num_tokens = self._of_model, len(request.tokens)
        self._metrics.record_first_token(self._model, request, ttft_s)
        workers = [trace.provenance]
        if trace.produced is not None:
            workers.insert(0, trace.produced.provenance)
        queue_s = min(ttft_s, trace.placed_s + sum(worker.times.waited_s for worker in workers))
        of_model.observe(specs.TTFT, ttft_s)
        of_model.observe(specs.QUEUE, queue_s)
        of_model.observe(specs.PREFILL, ttft_s - queue_s)
        of_model.observe(specs.PROMPT_LENGTH, num_tokens)
        of_model.count(specs.PROMPT_TOKENS, num_tokens)
        of_model.count(specs.QUERIES, num_tokens)
        of_model.count(specs.HITS, trace.cached_tokens(num_tokens))
        for miss in trace.misses:
            of_model.computed[miss.reason].inc(miss.end - miss.start)
        of_model.count(specs.STORE_QUERIES, max(0, num_tokens - workers[0].reused_tokens))
        of_model.count(specs.STORE_HITS, workers[0].fetched_tokens)
        of_model.observe(specs.HIT_DEPTH, workers[0].reused_tokens + workers[0].fetched_tokens)
        self._record_route(trace)
        return queue_s

    def _record_route(self, trace: Trace) -> None:
        found = trace.provenance
        if found.reused_tokens + found.fetched_tokens:
            self._of_model.count(specs.REPLAYED, found.computed_tokens)

    def _record_last(self, times: _Times, now_s: float) -> None:
        of_model, trace = self._of_model, times.trace
        of_model.observe(specs.E2E, now_s - self._start_s)
        of_model.observe(specs.INFERENCE, now_s - self._start_s - times.queue_s)
        of_model.observe(specs.DECODE, now_s - times.first_s)
        of_model.observe(specs.ANSWER_LENGTH, times.num_tokens)
        if times.num_tokens > 1:
            of_model.observe(specs.TPOT, (now_s - times.first_s) / (times.num_tokens - 1))
        of_model.observe(specs.ATTEMPTS, trace.attempts)
        of_model.count(specs.PLACED_AGAIN, trace.attempts - 1)
        of_model.count(specs.HANDED_OVER, trace.hand_overs)
