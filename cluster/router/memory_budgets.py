"""The router's knowledge of workers' memory: its size, the assigned budget, and an operator's."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidemill.cluster.messages import SetBudget
from tidemill.cluster.router.memory_broker import Account, rebalance
from tidemill.workers.messages import Heartbeat, RequestError, WorkerInfo, WorkerLoad

GATHER_S_MAX = 30.0
"""A restarted router moves nothing before every expected worker has reported, or for this long: a worker
that has not reported may hold more than its share.
"""

LEND_AFTER_S = 30.0
"""A worker without a heartbeat for this long is lost, and others may use all of its memory but its floor,
which its successor starts with.
A frozen process keeps what it has, and a restart is over sooner.
"""

PRESSED_S = 5.0
"""The time for which a worker's memory counts as short after it evicted something that was in use."""

NO_PRESSURE = ("_for_resize", "_for_cap")  # reasons of evictions that more memory would not have avoided
PRESSURE = ("preemptions", "evicted_pages_for_", "evicted_checkpoints_for_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One worker, by its latest report.
    `told_bytes` is the budget of the last answer, and the reported one before the first answer.
    """

    info: WorkerInfo
    load: WorkerLoad
    heard_at_s: float
    pressed_at_s: float | None
    told_bytes: int


class Budgets:
    """Answers every heartbeat with a budget. It is keyed by name: a restarted worker replaces its
    predecessor and keeps the operator's budget.
    """

    def __init__(self, clock: Callable[[], float], *, broker: bool, expected: frozenset[str]) -> None:
        self._clock = clock
        self._broker = broker
        self._missing = set(expected)
        self._started_s = clock()
        self._holdings: dict[str, Holding] = {}
        self._by_hand: dict[str, int] = {}

    def report(self, heartbeat: Heartbeat) -> int | None:
        """Return the worker's new budget; None while the router does not know enough."""
        info = heartbeat.info
        self._missing.discard(info.name)
        if not info.memory_max_bytes:
            return None  # it has no memory to share
        holding = self._holdings[info.name] = self._after(heartbeat)
        if self._missing and self._clock() - self._started_s < GATHER_S_MAX:
            return None
        told_bytes = rebalance(self._accounts(info.device), self._total_bytes(info.device))[info.name]
        self._holdings[info.name] = replace(holding, told_bytes=told_bytes)
        return told_bytes

    def set(self, name: str, budget_bytes: int | None) -> None:
        """Give a worker this budget until an operator changes it; None returns it to the broker.

        Raises RequestError for an unknown worker (404) or an impossible budget.
        """
        holding = self._holdings.get(name)
        if holding is None:
            known = ", ".join(sorted(self._holdings)) or "none was heard yet"
            raise RequestError(f"there is no worker {name!r}: {known}", param="worker", status=404)
        if budget_bytes is None:
            self._by_hand.pop(name, None)
            return
        info = holding.info
        others = [other.info for other in self._holdings.values() if other.info.device == info.device]
        kept_bytes = sum(self._kept_bytes(other) for other in others if other.name != name)
        left_bytes = self._total_bytes(info.device) - kept_bytes
        if budget_bytes < info.memory_floor_bytes:
            reason = f"it needs {info.memory_floor_bytes:,} for one request of {info.max_model_len:,} tokens"
        elif budget_bytes > info.memory_max_bytes:
            reason = f"it has address space for {info.memory_max_bytes:,}, reserved when it started"
        elif budget_bytes > left_bytes:
            reason = f"the other workers of its device keep {kept_bytes:,}, which leaves {left_bytes:,}"
        else:
            self._by_hand[name] = budget_bytes
            return
        raise RequestError(f"{name} cannot have {budget_bytes:,} bytes: {reason}", param="budget")

    def set_of(self, info: WorkerInfo) -> SetBudget:
        if info.name in self._by_hand:
            return SetBudget("operator", self._by_hand[info.name])
        if not self._broker:
            return SetBudget("share", info.memory_bytes)
        holding = self._holdings.get(info.name)
        return SetBudget("broker", 0 if holding is None else holding.told_bytes)

    def all(self) -> dict[str, SetBudget]:
        """Return the budgets of all workers that have reported, by name."""
        return {name: self.set_of(holding.info) for name, holding in self._holdings.items()}

    def _after(self, heartbeat: Heartbeat) -> Holding:
        info, load, now_s = heartbeat.info, heartbeat.load, self._clock()
        before = self._holdings.get(info.name)
        if before is None or before.info.worker != info.worker:
            return Holding(
                info=info,
                load=load,
                heard_at_s=now_s,
                pressed_at_s=None,
                told_bytes=load.budget_bytes,
            )
        return replace(
            before,
            load=load,
            heard_at_s=now_s,
            pressed_at_s=now_s if pressure(load) > pressure(before.load) else before.pressed_at_s,
        )

    def _kept_bytes(self, info: WorkerInfo) -> int:
        """Return what a worker keeps if another one is given as much as possible."""
        kept_bytes = info.memory_floor_bytes if self._broker else info.memory_bytes
        return self._by_hand.get(info.name, kept_bytes)

    def _total_bytes(self, device: str) -> int:
        return sum(
            holding.info.memory_bytes for holding in self._holdings.values() if holding.info.device == device
        )

    def _accounts(self, device: str) -> dict[str, Account]:
        return {
            name: self._account(holding)
            for name, holding in self._holdings.items()
            if holding.info.device == device
        }

    def _account(self, holding: Holding) -> Account:
        info, load, now_s = holding.info, holding.load, self._clock()
        floor_bytes = info.memory_floor_bytes
        if now_s - holding.heard_at_s > LEND_AFTER_S:
            return Account(
                floor_bytes=floor_bytes,
                max_bytes=floor_bytes,
                budget_bytes=floor_bytes,
                told_bytes=floor_bytes,
            )
        memory = load.memory
        pressed_at_s = holding.pressed_at_s
        return Account(
            floor_bytes=floor_bytes,
            max_bytes=info.memory_max_bytes,
            budget_bytes=load.budget_bytes,
            told_bytes=holding.told_bytes,
            mapped_bytes=memory.live + memory.cached + memory.free + memory.empty,
            live_bytes=memory.live,
            cached_bytes=memory.cached,
            wanted_bytes=load.wanted_bytes,
            pressed=pressed_at_s is not None and now_s - pressed_at_s <= PRESSED_S,
            pinned_bytes=self._by_hand.get(info.name, None if self._broker else info.memory_bytes),
        )


def pressure(load: WorkerLoad) -> float:
    """Return how often a worker evicted something that more memory would have kept, since its start."""
    return sum(
        count
        for name, count in load.counters.items()
        if name.startswith(PRESSURE) and not name.endswith(NO_PRESSURE)
    )
