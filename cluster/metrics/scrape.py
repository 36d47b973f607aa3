"""Parse the text of /metrics: values by name and labels, and the samples of histograms between two times."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from tidemill.cluster.metrics.specs import MODEL, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSnapshot:
    """The state of one histogram. `bounds` ascend and end with infinity; `counts` are cumulative."""

    total: float = 0.0
    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: "HistogramSnapshot") -> "HistogramSnapshot":
        """Return the samples since `before`; all of them if the server has restarted in between."""
        if before.bounds != self.bounds or before.count > self.count:
            return self
        pairs = zip(self.counts, before.counts, strict=True)
        return HistogramSnapshot(
            total=self.total - before.total,
            bounds=self.bounds,
            counts=tuple(now - then for now, then in pairs),
        )

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return what Prometheus's histogram_quantile returns: samples are spread evenly within a bucket, and
        those beyond the last bound are at it."""
        if self.count <= 0:
            return None
        rank = share * self.count
        edges = pairwise([(0.0, 0.0), *zip(self.bounds, self.counts, strict=True)])
        for (low, below), (high, upto) in edges:
            if upto >= rank and upto > below:
                return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
        return None


@dataclass(frozen=True, slots=True)
class Scraped:
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float] = field(
        default_factory=dict[tuple[str, frozenset[tuple[str, str]]], float]
    )

    def value(self, spec: Spec, model: str) -> float:
        """Return the value of a counter or gauge; 0 when there is none."""
        name = f"{spec.full_name}_total" if spec.kind == "counter" else spec.full_name
        return self.values.get((name, frozenset({(MODEL, model)})), 0.0)

    def seen(self, spec: Spec, model: str) -> HistogramSnapshot:
        found = {
            float(dict(labels)["le"]): value
            for (name, labels), value in self.values.items()
            if name == f"{spec.full_name}_bucket" and (MODEL, model) in labels
        }
        total = self.values.get((f"{spec.full_name}_sum", frozenset({(MODEL, model)})), 0.0)
        bounds = tuple(sorted(found))
        return HistogramSnapshot(total=total, bounds=bounds, counts=tuple(found[bound] for bound in bounds))


def scraped(text: str) -> Scraped:
    """Parse a text. Raises ValueError when it is not in the format."""
    families = text_string_to_metric_families(text)
    return Scraped(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
    )
