"""An engine that remembers whom it preempted."""

from collections import Counter
from functools import cached_property

from tidemill.workers.engine.engine import Engine
from tidemill.workers.scheduling.sequence import Sequence

PREEMPTIONS_MAX = 5_000
"""Of all requests of a run: no test comes near it, and a livelock is over in a moment instead of never."""


class WatchedEngine(Engine):
    """`preempted`: the names of requests, in order, whatever for. `preemptions_max`: of any one of them."""

    @cached_property
    def preempted(self) -> list[str]:
        return []

    @cached_property
    def _times(self) -> Counter[str]:
        return Counter()

    def _preempt(self, sequence: Sequence, error: Exception | None = None) -> None:
        super()._preempt(sequence, error)
        self.preempted.append(sequence.request.request_id)
        self._times[sequence.id] += 1
        assert len(self.preempted) < PREEMPTIONS_MAX, "a storm: the loop turns and nothing runs"

    @property
    def preemptions_max(self) -> int:
        return max(self._times.values(), default=0)
