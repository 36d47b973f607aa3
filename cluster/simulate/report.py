"""The outcome of a simulated trace, and its figures. Pure."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """An answered request. `reused_tokens` includes the `fetched_tokens` from the store."""

    at_s: float
    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    fetched_tokens: int = 0
    predicted_s: float = 0.0
    attempts: int = 1
    skipped_prefill: bool = False


@dataclass(slots=True)
class Outcome:
    """The outcome of a run. `gaps_s` has the times between tokens of all requests, `busy_s` the compute time
    of each worker by role."""

    served: list[SimulatedRequest] = field(default_factory=list[SimulatedRequest])
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    refused: int = 0
    failed: int = 0
    makespan_s: float = 0.0
    busy_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    counters: dict[str, float] = field(default_factory=dict[str, float])

    def figures(self) -> dict[str, Any]:
        """Return milliseconds, shares and counts by name."""
        first_ms = sorted(1000 * request.ttft_s for request in self.served)
        gaps_ms = sorted(1000 * gap for gap in self.gaps_s)
        prompts = sum(request.prompt_tokens for request in self.served)
        return {
            "requests": len(self.served) + self.refused + self.failed,
            "refused": self.refused,
            "failed": self.failed,
            "hit_ratio": sum(request.reused_tokens for request in self.served) / max(1, prompts),
            "fetched_ratio": sum(request.fetched_tokens for request in self.served) / max(1, prompts),
            "ttft_ms": distribution(first_ms),
            "itl_ms": distribution(gaps_ms),
            "imbalance": {role: imbalance(busy) for role, busy in self.busy_s.items()},
            "utilisation": {
                role: mean(busy) / max(self.makespan_s, 1e-9) for role, busy in self.busy_s.items()
            },
            "without_prefill_worker": sum(request.skipped_prefill for request in self.served),
            "placed_again": sum(request.attempts > 1 for request in self.served),
            "makespan_s": self.makespan_s,
            "counters": self.counters,
        }


def distribution(ascending: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(ascending)} | {f"p{share}": percentile(ascending, share) for share in SHARES}


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the least value that `share` percent of the values do not exceed; 0 without values."""
    if not ascending:
        return 0.0
    return ascending[max(0, -int(-share * len(ascending) // 100) - 1)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def imbalance(busy_s: Iterable[float]) -> float:
    """Return the ratio of the busiest worker's time to the mean; 1 is even."""
    each = list(busy_s)
    return max(each) / mean(each) if any(each) else 1.0
