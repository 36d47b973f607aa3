"""What a worker does now: its role, and whether it hands everything over. Orders change it."""

from dataclasses import replace
from typing import Protocol

from tidemill.workers.messages import Ack, WorkerInfo


class RestrictableEngine(Protocol):
    def restrict(self, *, produces: bool, generates: bool) -> None: ...


class Assignment:
    """`info` says its present role. Who leaves hands everything over, whatever the router says after that."""

    def __init__(self, engine: RestrictableEngine, info: WorkerInfo) -> None:
        self.info = info
        self.leaves = False
        self._engine = engine
        self._drains = False  # the router's word

    @property
    def draining(self) -> bool:
        return self.leaves or self._drains

    def apply(self, ack: Ack) -> None:
        """What the router answers to a heartbeat."""
        changed = ack.drain is not self._drains and not self.leaves
        self._drains = ack.drain
        if ack.role is not None and ack.role != self.info.role:
            self.info = replace(self.info, role=ack.role)
            changed = True
        if changed:
            self._restrict()

    def leave(self) -> None:
        """The process was told to end."""
        if not self.leaves:
            self.leaves = True
            self._restrict()

    def _restrict(self) -> None:
        role, takes = self.info.role, not self.draining
        self._engine.restrict(produces=takes and role != "decode", generates=takes and role != "prefill")
