"""An engine that records its preemptions."""

from collections import Counter
from functools import cached_property

from tidemill.workers.engine.engine import Engine
from tidemill.workers.scheduling.sequence import Sequence

PREEMPTIONS_MAX = 5_000
"""The limit of all preemptions of a run. No test comes near it, and a livelock ends."""


class WatchedEngine(Engine):
    """`preempted` has the ids of preempted requests in order, `preemptions_max` the most of any request."""

    @cached_property
    def preempted(self) -> list[str]:
        return []

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter()

    def _preempt(self, sequence: Sequence, error: Exception | None = None) -> None:
        super()._preempt(sequence, error)
        self.preempted.append(sequence.request.request_id)
        self._counts[sequence.id] += 1
        assert len(self.preempted) < PREEMPTIONS_MAX, "livelock: the loop turns and no request advances"

    @property
    def preemptions_max(self) -> int:
        return max(self._counts.values(), default=0)
