"""The last fifteen minutes of a server: a ring of rows, made from the samples that /metrics would show."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_samples import EdgeSamples
from tidemill.cluster.metrics.scrape import HistogramSnapshot
from tidemill.cluster.metrics.specs import MODEL, Spec

K = TypeVar("K")
N = TypeVar("N", int, float)

PERIOD_S = 5.0
ROWS = 180
"""The number of rows of a model: fifteen minutes."""

MARKS = 500
"""The number of starts and ends of workers that are kept."""

QUANTILES = (0.5, 0.99)

ALL = ""
"""The name of the rows of all models together."""

Values = dict[tuple[str, str], float]
"""Counters by name and, for those of a histogram, the bound of the bucket."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One model over one period; `at_s` is the unix time of its end. A value without events is None.

    `ttft_s` and `itl_s` are the percentiles QUANTILES in seconds. `memory` has bytes by class, over all
    workers.
    """

    at_s: float
    tokens_per_s: float
    hit_ratio: float | None
    ttft_s: tuple[float | None, ...]
    itl_s: tuple[float | None, ...]
    memory: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkerMark:
    """The start or the end of one incarnation of a worker, as the reports of its fleet showed it."""

    at_s: float
    model: str
    worker: str
    kind: str  # "start" or "end"


@dataclass(frozen=True, slots=True)
class _Totals:
    at_s: float
    values: Values

    def grown(self, before: "_Totals", spec: Spec, suffix: str = "_total") -> float:
        key = (spec.full_name + suffix, "")
        return max(0.0, self.values.get(key, 0.0) - before.values.get(key, 0.0))

    def quantiles(self, before: "_Totals", spec: Spec) -> tuple[float | None, ...]:
        """Return the percentiles QUANTILES of what a histogram has counted since `before`."""
        name = f"{spec.full_name}_bucket"
        counted = {
            float(bound): value - before.values.get((name, bound), 0.0)
            for (of, bound), value in self.values.items()
            if of == name
        }
        bounds = tuple(sorted(counted))
        grown = HistogramSnapshot(bounds=bounds, counts=tuple(counted[bound] for bound in bounds))
        return tuple(grown.quantile(share) for share in QUANTILES)


@dataclass(slots=True)
class History:
    rows: dict[str, deque[HistoryRow]] = field(default_factory=dict[str, deque[HistoryRow]])
    marks: deque[WorkerMark] = field(default_factory=lambda: deque[WorkerMark](maxlen=MARKS))
    _before: dict[str, _Totals] = field(default_factory=dict[str, _Totals])
    _workers: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def add(self, at_s: float, samples: EdgeSamples, fleets: Mapping[str, FleetStatus]) -> None:
        """Add a period that ends now. A fleet whose router does not answer is missing in `fleets`."""
        memory = {
            model: added_up(worker.load.memory for worker in status.workers)
            for model, status in fleets.items()
        }
        memory[ALL] = added_up(memory.values())
        for model, values in _values_of(samples, memory).items():
            totals = _Totals(at_s, values)
            before = self._before.get(model)
            self._before[model] = totals
            if before is not None and totals.at_s > before.at_s:
                row = _row(before, totals, memory.get(model, {}))
                self.rows.setdefault(model, deque(maxlen=ROWS)).append(row)
        for model, status in fleets.items():
            workers = frozenset(worker.info.worker for worker in status.workers)
            known = self._workers.get(model)
            self._workers[model] = workers
            if known is not None:
                self.marks.extend(WorkerMark(at_s, model, name, "start") for name in sorted(workers - known))
                self.marks.extend(WorkerMark(at_s, model, name, "end") for name in sorted(known - workers))

    def json(self) -> dict[str, object]:
        return {
            "period_s": PERIOD_S,
            "quantiles": QUANTILES,
            "models": {model: [asdict(row) for row in rows] for model, rows in self.rows.items()},
            "marks": [asdict(mark) for mark in self.marks],
        }


def _values_of(samples: EdgeSamples, models: Iterable[str]) -> dict[str, Values]:
    """Return the counters of these models and of all that have had a request, and their sums as ALL."""
    values: dict[str, Values] = {model: {} for model in (*samples.under_way, *models)}
    for family in samples.families.values():
        for name, labels, value in family:
            known = dict(labels)
            if known.get(MODEL) in values and set(known) <= {MODEL, "le"}:
                values[known[MODEL]][name, known.get("le", "")] = value
    values[ALL] = added_up(values.values())
    return values


def added_up(parts: Iterable[Mapping[K, N]]) -> dict[K, N]:
    sums: dict[K, N] = {}
    for part in parts:
        for key, value in part.items():
            sums[key] = sums[key] + value if key in sums else value
    return sums


def _row(before: _Totals, now: _Totals, memory: Mapping[str, int]) -> HistoryRow:
    queries = now.grown(before, specs.QUERIES)
    return HistoryRow(
        at_s=now.at_s,
        tokens_per_s=now.grown(before, specs.GENERATION_TOKENS) / (now.at_s - before.at_s),
        hit_ratio=now.grown(before, specs.HITS) / queries if queries else None,
        ttft_s=now.quantiles(before, specs.TTFT),
        itl_s=now.quantiles(before, specs.ITL),
        memory=memory,
    )
