"""The memory budgets of workers: reported, assigned by the broker, and set by operators."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidemill.cluster.messages import BudgetTarget
from tidemill.cluster.router.memory_broker import Account, rebalance
from tidemill.workers.messages import Heartbeat, RequestError, WorkerInfo, WorkerLoad

GATHER_S_MAX = 30.0
"""A new router assigns no budget before all expected workers have reported, or for this long. A worker that
has not reported yet may hold more than its share."""

LEND_AFTER_S = 30.0
"""The silence after which others may use the memory of a worker, except its floor. Its next incarnation
starts with the floor. A restart takes less time. A frozen process keeps its memory."""

PRESSED_S = 5.0
"""The time for which a worker counts as short of memory after an eviction or a preemption."""

NO_PRESSURE = ("_for_resize", "_for_cap")  # reasons of evictions that more memory would not avoid
PRESSURE = ("preemptions", "evicted_pages_for_", "evicted_checkpoints_for_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A worker, by its latest heartbeat. `assigned_bytes` is the budget of the last answer, initially the
    reported one."""

    info: WorkerInfo
    load: WorkerLoad
    heartbeat_at_s: float
    pressed_at_s: float | None
    assigned_bytes: int


class Budgets:
    """Answers each heartbeat with a budget. Workers are keyed by name: a budget set by an operator survives a
    restart of the worker."""

    def __init__(self, clock: Callable[[], float], *, broker: bool, expected: frozenset[str]) -> None:
        self._clock = clock
        self._broker = broker
        self._missing = set(expected)
        self._started_s = clock()
        self._holdings: dict[str, Holding] = {}
        self._set_by_operator: dict[str, int] = {}

    def report(self, heartbeat: Heartbeat) -> int | None:
        """Record a heartbeat. Return the new budget; None while not all have reported."""
        info = heartbeat.info
        self._missing.discard(info.name)
        if not info.memory_max_bytes:
            return None  # a worker without memory to share
        holding = self._holdings[info.name] = self._updated(heartbeat)
        if self._missing and self._clock() - self._started_s < GATHER_S_MAX:
            return None
        assigned_bytes = rebalance(self._accounts(info.device), self._total_bytes(info.device))[info.name]
        self._holdings[info.name] = replace(holding, assigned_bytes=assigned_bytes)
        return assigned_bytes

    def set(self, name: str, budget_bytes: int | None) -> None:
        """Pin the budget of a worker until an operator changes it; None returns it to the broker. Raises
        RequestError: there is no such worker (404), or it cannot have this budget."""
        holding = self._holdings.get(name)
        if holding is None:
            known = ", ".join(sorted(self._holdings)) or "none has reported yet"
            raise RequestError(f"there is no worker {name!r}: {known}", param="worker", status=404)
        if budget_bytes is None:
            self._set_by_operator.pop(name, None)
            return
        info = holding.info
        others = [held.info for held in self._holdings.values() if held.info.device == info.device]
        kept_bytes = sum(self._kept_bytes(other) for other in others if other.name != name)
        left_bytes = self._total_bytes(info.device) - kept_bytes
        if budget_bytes < info.memory_floor_bytes:
            reason = f"it needs {info.memory_floor_bytes:,} for one request of {info.max_model_len:,} tokens"
        elif budget_bytes > info.memory_max_bytes:
            reason = f"it has address space for {info.memory_max_bytes:,}, reserved when it started"
        elif budget_bytes > left_bytes:
            reason = f"the other workers of its device keep {kept_bytes:,}, which leaves {left_bytes:,}"
        else:
            self._set_by_operator[name] = budget_bytes
            return
        raise RequestError(f"{name} cannot have {budget_bytes:,} bytes: {reason}", param="budget")

    def target(self, info: WorkerInfo) -> BudgetTarget:
        if info.name in self._set_by_operator:
            return BudgetTarget("operator", self._set_by_operator[info.name])
        if not self._broker:
            return BudgetTarget("share", info.memory_bytes)
        holding = self._holdings.get(info.name)
        return BudgetTarget("broker", 0 if holding is None else holding.assigned_bytes)

    def all(self) -> dict[str, BudgetTarget]:
        return {name: self.target(holding.info) for name, holding in self._holdings.items()}

    def _updated(self, heartbeat: Heartbeat) -> Holding:
        info, load, now_s = heartbeat.info, heartbeat.load, self._clock()
        before = self._holdings.get(info.name)
        if before is None or before.info.worker != info.worker:
            return Holding(
                info=info,
                load=load,
                heartbeat_at_s=now_s,
                pressed_at_s=None,
                assigned_bytes=load.budget_bytes,
            )
        return replace(
            before,
            load=load,
            heartbeat_at_s=now_s,
            pressed_at_s=now_s if pressure(load) > pressure(before.load) else before.pressed_at_s,
        )

    def _kept_bytes(self, info: WorkerInfo) -> int:
        """Return the memory that a worker keeps when another one gets as much as possible."""
        kept_bytes = info.memory_floor_bytes if self._broker else info.memory_bytes
        return self._set_by_operator.get(info.name, kept_bytes)

    def _total_bytes(self, device: str) -> int:
        return sum(held.info.memory_bytes for held in self._holdings.values() if held.info.device == device)

    def _accounts(self, device: str) -> dict[str, Account]:
        return {
            name: self._account(holding)
            for name, holding in self._holdings.items()
            if holding.info.device == device
        }

    def _account(self, holding: Holding) -> Account:
        info, load, now_s = holding.info, holding.load, self._clock()
        floor_bytes = info.memory_floor_bytes
        if now_s - holding.heartbeat_at_s > LEND_AFTER_S:
            return Account(
                floor_bytes=floor_bytes,
                max_bytes=floor_bytes,
                budget_bytes=floor_bytes,
                assigned_bytes=floor_bytes,
            )
        pressed_at_s = holding.pressed_at_s
        return Account(
            floor_bytes=floor_bytes,
            max_bytes=info.memory_max_bytes,
            budget_bytes=load.budget_bytes,
            assigned_bytes=holding.assigned_bytes,
            mapped_bytes=sum(load.memory.values()) - load.memory.get("unmapped", 0),
            live_bytes=load.live_bytes,
            cached_bytes=load.cached_bytes,
            wanted_bytes=load.wanted_bytes,
            pressed=pressed_at_s is not None and now_s - pressed_at_s <= PRESSED_S,
            pinned_bytes=self._set_by_operator.get(info.name, None if self._broker else info.memory_bytes),
        )


def pressure(load: WorkerLoad) -> float:
    """Count the evictions and preemptions of a worker that more memory would have avoided."""
    return sum(
        count
        for name, count in load.counters.items()
        if name.startswith(PRESSURE) and not name.endswith(NO_PRESSURE)
    )
