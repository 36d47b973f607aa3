"""The journal of a cluster: its desired state, written before it is acted on.

Each entry is the whole state under a number, and a number is written only once. So the number fences:
a supervisor that was replaced finds its next number taken, or a higher one there, and may not act on
what it wanted to write. Entries before the newest are removed.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from tidemill.cluster.processes.joining.members import Members
from tidemill.cluster.settings import FleetSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Role

DIGITS = 16


class Fenced(TidemillError):
    """Another process has written to the journal since: this one may not act any more."""


class Lifecycle(Enum):
    SERVING = "serving"  # counts for its role, also while it starts or Ray restarts it
    DRAINED = "drained"  # an operator drained it
    LEAVING = "leaving"  # the scaler wants it gone, and the router has not reported it draining yet
    DRAINING = "draining"  # the scaler wants it gone, and the router reports it draining


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """A worker that should exist. An actor that is not `created` may exist or not."""

    started_as: Role
    role: Role  # as the router reported it last
    state: Lifecycle = Lifecycle.SERVING
    created: bool = False
    worker: str = ""  # its process, as the router reported it last


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The workers that a fleet should have, the oldest first. The names in `retired` are not used again,
    because the router may remember another role for them."""

    workers: dict[str, PlannedWorker] = field(default_factory=dict[str, PlannedWorker])
    retired: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The desired state of a cluster. `server` identifies the start of `tidemill serve` that it belongs to.
    With `stopped` nothing of it should run. Once it has `served`, an endpoint waits for one worker of each
    fleet, before that for all. `resets` counts those of the prefix cache, by the fleet's first router."""

    server: str = ""
    stopped: bool = True
    served: bool = False
    routers: tuple[str, ...] = ()
    fleets: tuple[FleetPlan, ...] = ()
    resets: dict[str, int] = field(default_factory=dict[str, int])
    members: Members = field(default_factory=Members)

    @property
    def workers(self) -> list[str]:
        return [name for fleet in self.fleets for name in fleet.workers]


def initial_plan(fleet: FleetSettings) -> FleetPlan:
    workers = {
        worker.name: PlannedWorker(started_as=worker.role, role=worker.role) for worker in fleet.workers
    }
    return FleetPlan(workers=workers)


class JournalStore(Protocol):
    """A key-value store. What it has acknowledged outlives every supervisor."""

    def put_new(self, key: str, value: bytes) -> bool:
        """Store the value and return True, unless the key is there."""
        ...

    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...


class Journal:
    """The journal of one Ray namespace. `open` it before the first `write`."""

    def __init__(self, store: JournalStore, namespace: str) -> None:
        self._store = store
        self._prefix = f"journal/{namespace}/"
        self._number = 0

    def open(self) -> ClusterPlan:
        """Take the journal over: fence every process that wrote to it before. Return the newest plan."""
        while True:
            plan = self.read()
            try:
                self.write(plan)
            except Fenced:
                continue
            return plan

    @property
    def number(self) -> int:
        """The number of the newest entry that this process has read or written."""
        return self._number

    def read(self) -> ClusterPlan:
        """Return the newest plan, and write nothing."""
        while True:
            self._number = newest = max(self._numbers(), default=0)
            data = self._store.get(self._key(newest)) if newest else None
            if data is not None:
                return msgspec.json.decode(data, type=ClusterPlan)
            if not newest:
                return ClusterPlan()  # else a later one was written meanwhile

    def write(self, plan: ClusterPlan) -> None:
        """Store the plan. The caller may act on it when this returns. Raises Fenced."""
        number = self._number + 1
        if not self._store.put_new(self._key(number), msgspec.json.encode(plan)):
            raise Fenced(f"entry {number} of the journal is another process's")
        numbers = self._numbers()
        if max(numbers) > number:  # this number was removed, and so free again
            self._store.delete(self._key(number))
            raise Fenced(f"the journal is at entry {max(numbers)}, written by another process")
        self._number = number
        for older in numbers:
            if older < number:
                self._store.delete(self._key(older))

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(self._prefix)) for key in self._store.keys(self._prefix)]

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:0{DIGITS}}"
