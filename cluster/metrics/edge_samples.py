"""The samples of an edge's own metrics as data, so that one edge can answer with the sum of several.

Counters of an edge that has ended stay in the sum, because Prometheus takes a sum that falls for a reset.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from tidemill.cluster.metrics.edge_metrics import EdgeMetrics

CREATED = "_created"
"""The suffix of a sample with the time of a counter's start."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class EdgeSamples:
    """Values by family, then by name and labels, and the open answers by model. All can be added up.
    `up` has, by the index of an edge process, whether its values are new."""

    families: Mapping[str, list[tuple[str, Labels, float]]] = field(
        default_factory=dict[str, list[tuple[str, Labels, float]]]
    )
    under_way: Mapping[str, int] = field(default_factory=dict[str, int])
    up: Mapping[str, bool] = field(default_factory=dict[str, bool])

    def ended(self) -> "EdgeSamples":
        """Return what remains of an edge after its end."""
        return EdgeSamples(self.families, dict.fromkeys(self.under_way, 0))


def samples_of(metrics: EdgeMetrics) -> EdgeSamples:
    families = {
        family.name: [(found.name, tuple(found.labels.items()), found.value) for found in family.samples]
        for family in metrics.registry.collect()
    }
    return EdgeSamples(families, dict(metrics.under_way))


def added(edges: Iterable[EdgeSamples]) -> EdgeSamples:
    """Return the sums over edges; a start is that of the first edge."""
    families: defaultdict[str, dict[tuple[str, Labels], float]] = defaultdict(dict)
    under_way: defaultdict[str, int] = defaultdict(int)
    for edge in edges:
        for family, samples in edge.families.items():
            sums = families[family]
            for name, labels, value in samples:
                known = sums.get((name, labels))
                if known is None:
                    sums[name, labels] = value
                else:
                    sums[name, labels] = min(known, value) if name.endswith(CREATED) else known + value
        for model, count in edge.under_way.items():
            under_way[model] += count
    return EdgeSamples(
        {
            family: [(name, labels, value) for (name, labels), value in sums.items()]
            for family, sums in families.items()
        },
        dict(under_way),
    )


def with_samples(families: Iterable[Metric], samples: EdgeSamples) -> Iterator[Metric]:
    """Yield the families with these samples instead of their own."""
    for family in families:
        family.samples = [
            Sample(name, dict(labels), value) for name, labels, value in samples.families.get(family.name, ())
        ]
        yield family
