"""Write the text that Prometheus scrapes: measurements of the edge, reports of workers, and aliases."""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.edge_samples import EdgeSamples, with_samples
from tidemill.cluster.metrics.specs import PREFIX
from tidemill.cluster.metrics.worker_metrics import COUNTERS, FleetCollector
from tidemill.cluster.observability.telemetry import MetricsAlias

CONTENT_TYPE = CONTENT_TYPE_LATEST

ALIASES: dict[MetricsAlias, frozenset[str]] = {
    "vllm": frozenset(
        spec.name
        for spec in (
            *(specs.RUNNING, specs.WAITING, specs.USAGE),
            *(specs.TTFT, specs.ITL, specs.TPOT, specs.E2E, specs.QUEUE, specs.PREFILL, specs.DECODE),
            *(specs.PROMPT_TOKENS, specs.GENERATION_TOKENS, specs.SUCCESS, specs.QUERIES, specs.HITS),
            COUNTERS["preemptions"],
        )
    ),
}
"""The metrics that tools of another engine read, under its prefix. They have the same meaning here."""


def exposition(
    metrics: EdgeMetrics, fleets: Mapping[str, FleetStatus], summed: EdgeSamples | None = None
) -> bytes:
    """Return the text. `fleets` has, by model, the status of each fleet whose router answers. `summed` are
    the sums of several edges, instead of the values of `metrics`."""
    shown = CollectorRegistry(auto_describe=False)
    shown.register(_All(metrics, fleets, summed))
    return generate_latest(shown)


class _All:
    def __init__(
        self, metrics: EdgeMetrics, fleets: Mapping[str, FleetStatus], samples: EdgeSamples | None
    ) -> None:
        self._metrics = metrics
        self._samples = samples
        self._reports = FleetCollector(fleets, metrics.under_way if samples is None else samples.under_way)

    def collect(self) -> Iterator[Metric]:
        own = self._metrics.registry.collect()
        if self._samples is not None:
            own = with_samples(own, self._samples)
        up = {"0": True} if self._samples is None else self._samples.up
        families = [*own, _up_family(up), *self._reports.collect()]
        yield from families
        if self._metrics.alias is not None:
            yield from _aliased(families, self._metrics.alias)


def _up_family(up: Mapping[str, bool]) -> Metric:
    family = GaugeMetricFamily(specs.EDGE_UP.full_name, specs.EDGE_UP.text, labels=specs.EDGE_UP.labels)
    for edge, is_up in up.items():
        family.add_metric([edge], is_up)
    return family


def _aliased(families: Iterable[Metric], alias: MetricsAlias) -> Iterator[Metric]:
    for family in families:
        name = family.name.removeprefix(PREFIX)
        if name not in ALIASES[alias]:
            continue
        other = copy(family)
        other.name = f"{alias}:{name}"
        other.samples = [
            sample._replace(name=sample.name.replace(PREFIX, f"{alias}:", 1)) for sample in family.samples
        ]
        yield other
