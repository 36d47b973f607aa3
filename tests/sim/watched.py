"""An engine that remembers whom it preempted."""

from collections.abc import Callable

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.ledger import Ledger
from tidemill.workers.engine import Engine, Limits
from tidemill.workers.sequence import Sequence
from tidemill.workers.step import Runner
from tidemill.workers.transfer import Transfer


class WatchedEngine(Engine):
    """`preempted`: the names of requests, in order, whatever for. `preemptions_max`: of one request for the
    memory of older ones, changes of the budget aside."""

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
        self.preemptions_max = 0

    def _preempt(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        self.preempted.append(sequence.request.request_id)
        self.preemptions_max = max(self.preemptions_max, sequence.preemptions)
