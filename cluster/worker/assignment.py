"""The current assignment of a worker: its role, and whether it drains. Orders of the router change it."""

from dataclasses import replace

from tidemill.workers.contract.engine import RestrictableEngine
from tidemill.workers.messages import Ack, WorkerInfo


class Assignment:
    """The orders that a worker follows. `info` has its current role. A process that was ordered to exit
    drains, whatever the router orders afterwards."""

    def __init__(self, engine: RestrictableEngine, info: WorkerInfo) -> None:
        self.info = info
        self.leaves = False
        self._engine = engine
        self._drains = False  # the router's order

    @property
    def draining(self) -> bool:
        return self.leaves or self._drains

    def apply(self, ack: Ack) -> None:
        changed = ack.drain is not self._drains and not self.leaves
        self._drains = ack.drain
        if ack.role in self.info.roles and ack.role != self.info.role:
            self.info = replace(self.info, role=ack.role)
            changed = True
        if changed:
            self._restrict()

    def leave(self) -> None:
        if not self.leaves:
            self.leaves = True
            self._restrict()

    def _restrict(self) -> None:
        role, takes = self.info.role, not self.draining
        self._engine.restrict(produces=takes and role != "decode", generates=takes and role != "prefill")
