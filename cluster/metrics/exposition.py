"""Write the text that Prometheus scrapes: measurements of the edge, reports of workers, and aliases."""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.edge_samples import EdgeSamples, with_samples
from tidemill.cluster.metrics.specs import PREFIX, Collected
from tidemill.cluster.metrics.worker_metrics import COUNTERS, reported
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
    return generate_latest(Collected(partial(_families, metrics, fleets, summed)))


def _families(
    metrics: EdgeMetrics, fleets: Mapping[str, FleetStatus], summed: EdgeSamples | None
) -> Iterator[Metric]:
    own = metrics.registry.collect()
    under_way, up = metrics.under_way, {"0": True}
    if summed is not None:
        own, under_way, up = with_samples(own, summed), summed.under_way, summed.up
    shown_up = specs.EDGE_UP.family(([edge], is_up) for edge, is_up in up.items())
    families = [*own, shown_up, *reported(fleets, under_way)]
    yield from families
    if metrics.alias is not None:
        yield from _aliased(families, metrics.alias)


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
