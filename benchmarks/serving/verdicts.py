"""The verdicts of benchmarks.serving.abuse: goals, what counts as a miss, and the line of the table.

Other work on the machine makes gaps too. So the worst gap of the calm before an attack is subtracted, and an
excess that is no larger than the worst gap of all calm parts of the run is not judged, nor one that is no
larger than the time for which the good client itself was late: it has another core than the server. A hold
of the event loop in CPU time is judged on any machine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from benchmarks.serving.good_client import Seen

GAP_MS_MAX = {"body": 50.0, "flood": 250.0, "reset": 250.0, "soak": inf}
WAIT_MS_MAX = {"reset": 200.0}
"""The goals for waits beyond the calm: each ping needs a new connection, which resets may delay."""

GROWTH_MIB_MAX = 64.0

GOOD, MISSED, NOT_JUDGED, NOT_RUN = (
    "good",
    "missed",
    "not judged: calm gaps or lag were as large",
    "not run: no time",
)
STATUSES = {MISSED: 1, NOT_RUN: 75, NOT_JUDGED: 77, GOOD: 0}
"""The exit status of a part, by its worst verdict: the first of these that occurs."""


def gap_verdict(gap_ms: float, other_ms: float, gap_ms_max: float, hold_ms: float = 0.0) -> str:
    """Judge a gap of `gap_ms` beyond the calm before it, where other work makes gaps of up to
    `other_ms`; `hold_ms` of CPU time cannot come from other work."""
    if gap_ms <= gap_ms_max:
        return GOOD
    return NOT_JUDGED if gap_ms <= other_ms and hold_ms <= gap_ms_max else MISSED


def worst(verdicts: Sequence[str]) -> str:
    return next((kind for kind in STATUSES if any(verdict == kind for verdict in verdicts)), GOOD)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one attack. Goals: GAP_MS_MAX, WAIT_MS_MAX, GROWTH_MIB_MAX, and no refused or
    broken answer."""

    name: str
    kind: str
    gap_ms: float = 0.0  # beyond the calm
    calm_gap_ms: float = 0.0  # of the calm before it
    run_calm_gap_ms: float = 0.0  # of all calm parts of the run
    lag_ms: float = 0.0  # of the good client itself
    wait_ms: float = 0.0  # the longest ping or request, beyond the calm
    hold_ms: float = 0.0  # of the event loop of the edge
    process_hold_ms: float = 0.0
    growth_mib: float = 0.0
    streams: int = 0
    refused: int = 0
    broken: int = 0
    statuses: dict[str, int]
    trouble: Sequence[str] = ()
    has_run: bool = True

    @property
    def ratio(self) -> float:
        """The gap beyond the calm by what other work makes: up to 1 it may be that."""
        return self.gap_ms / self.other_ms if self.other_ms else 0.0

    @property
    def other_ms(self) -> float:
        """The worst calm gap of the run, or the lag of the client if that is more."""
        return max(self.run_calm_gap_ms, self.lag_ms)

    @property
    def gap(self) -> str:
        return gap_verdict(self.gap_ms, self.other_ms, GAP_MS_MAX[self.kind], self.hold_ms)

    @property
    def misses(self) -> list[str]:
        return [
            *(["gap"] if self.gap == MISSED else []),
            *(["wait"] if self.wait_ms - self.lag_ms > WAIT_MS_MAX.get(self.kind, inf) else []),
            *(["memory"] if self.growth_mib > GROWTH_MIB_MAX else []),
            *(["refused"] if self.refused else []),
            *(["broken"] if self.broken else []),
            *(["5xx"] if any(status.startswith("5") for status in self.statuses) else []),
        ]

    @property
    def verdict(self) -> str:
        if not self.has_run:
            return NOT_RUN
        return MISSED if self.misses else self.gap

    @property
    def may_be_noise(self) -> bool:
        """True if another round may find a smaller gap, and nothing else is wrong."""
        return {*self.misses} <= {"gap", "wait"} and self.verdict != GOOD

    def with_round(self, other: "Verdict") -> "Verdict":
        """Return the verdict of two rounds: that of the smaller wait or gap, which has less of other work in
        it, and everything else that was wrong in either."""
        better = min((self, other), key=lambda verdict: ("wait" in verdict.misses, verdict.gap_ms))
        return replace(
            better,
            run_calm_gap_ms=max(self.run_calm_gap_ms, other.run_calm_gap_ms),
            growth_mib=max(self.growth_mib, other.growth_mib),
            streams=self.streams + other.streams,
            refused=self.refused + other.refused,
            broken=self.broken + other.broken,
            statuses={
                status: self.statuses.get(status, 0) + other.statuses.get(status, 0)
                for status in self.statuses | other.statuses
            },
            trouble=[*self.trouble, *other.trouble][:3],
        )

    def line(self) -> str:
        words = f"{self.verdict} {' '.join(self.misses)}" if self.misses else self.verdict
        return (
            f"{self.name:36} {self.kind:6} {self.gap_ms:8.0f} {self.calm_gap_ms:8.0f} "
            f"{self.lag_ms:6.0f} {self.ratio:6.1f} {self.wait_ms:8.0f} "
            f"{self.hold_ms:5.0f} {self.process_hold_ms:5.0f} {self.growth_mib:7.0f} "
            f"{self.refused:5} {self.broken:5}  {words:12} {json.dumps(self.statuses)}"
        )


HEADING = (
    f"{'attack':36} {'kind':6} {'gap ms':>8} {'calm ms':>8} {'lag ms':>6} {'ratio':>6} {'wait ms':>8} "
    f"{'hold':>5} {'CPU':>5} {'MiB':>7} {'429':>5} {'wrong':>5}  verdict"
)


def verdict_of(
    name: str, kind: str, calm: Seen, seen: Seen, statuses: dict[str, int], growth_mib: float
) -> Verdict:
    """Compare what was seen under an attack with the calm before it. Both count what went wrong."""
    wrong = calm.broken + seen.broken
    return Verdict(
        name=name,
        kind=kind,
        gap_ms=round(1000 * (seen.gap_s - calm.gap_s), 1),
        calm_gap_ms=round(1000 * calm.gap_s, 1),
        run_calm_gap_ms=round(1000 * calm.gap_s, 1),
        lag_ms=round(1000 * seen.lag_s, 1),
        wait_ms=round(1000 * (seen.wait_s - calm.wait_s), 1),
        hold_ms=round(1000 * seen.hold_s, 1),
        process_hold_ms=round(1000 * seen.process_hold_s, 1),
        growth_mib=round(growth_mib, 1),
        streams=seen.streams,
        refused=calm.refused + seen.refused,
        broken=len(wrong),
        statuses=statuses,
        trouble=wrong[:3],
    )
