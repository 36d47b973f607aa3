"""An engine that remembers whom it preempted."""

from collections import Counter
from collections.abc import Callable

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.ledger import Ledger
from tidemill.workers.engine import Engine, Limits
from tidemill.workers.sequence import Sequence
from tidemill.workers.step import Runner
from tidemill.workers.transfer import Transfer

PREEMPTIONS_MAX = 5_000
"""Of all requests of a run: no test comes near it, and a livelock is over in a moment instead of never."""


class WatchedEngine(Engine):
    """`preempted`: the names of requests, in order, whatever for. `preemptions_max`: of any one of them."""

    def __init__(
        self,
        ledger: Ledger,
        transfer: Transfer,
        runner: Runner,
        limits: Limits,
        root_of: Callable[[str], PageKey],
    ) -> None:
        super().__init__(ledger, transfer, runner, limits, root_of)
        self.preempted: list[str] = []
        self._times = Counter[str]()

    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        self.preempted.append(sequence.request.request_id)
        self._times[sequence.id] += 1
        assert len(self.preempted) < PREEMPTIONS_MAX, "a storm: the loop turns and nothing runs"

    @property
    def preemptions_max(self) -> int:
        return max(self._times.values(), default=0)
