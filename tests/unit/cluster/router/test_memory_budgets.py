"""Memory budgets: never more than a device has, with lost, slow, killed and restarted workers; the broker
follows demand and does not oscillate."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.heartbeats import heartbeat, worker_info
from tidemill.cluster.router.memory_broker import Account, held_bytes, rebalance
from tidemill.cluster.router.memory_budgets import GATHER_S_MAX, LEND_AFTER_S, PRESSED_S, Budgets
from tidemill.workers.messages import NO_MEMORY, Heartbeat, RequestError, WorkerInfo

MIB = 1 << 20
SHARE = 64 * MIB
FLOOR = 4 * MIB
NAMES = ("decode-0", "decode-1", "prefill-0")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Worker:
    """A worker that takes memory within its budget, and gives memory back with a delay."""

    name: str
    floor: int = FLOOR
    most: int = 3 * SHARE
    device: str = "here/cpu"
    incarnation: int = 0
    budget: int = FLOOR
    mapped: int = 0
    live: int = 0
    wanted: int = 0
    counters: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def taken(self) -> int:
        """The memory that it has, or may take at any moment."""
        return max(self.budget, self.mapped)

    def heartbeat(self) -> Heartbeat:
        return heartbeat(
            self.info(),
            memory=NO_MEMORY | {"pages_live": self.live, "empty": self.mapped - self.live},
            budget_bytes=self.budget,
            wanted_bytes=self.wanted,
            counters=dict(self.counters),
        )

    def info(self) -> WorkerInfo:
        return worker_info(
            f"{self.name}.{self.incarnation}",
            device=self.device,
            memory_bytes=SHARE,
            memory_floor_bytes=self.floor,
            memory_max_bytes=self.most,
            max_model_len=512,
        )

    def resize(self, budget: int | None) -> None:
        if budget is not None:
            assert self.floor <= budget <= self.most
            self.budget = budget

    def restart(self) -> None:
        self.incarnation += 1
        self.budget, self.mapped, self.live = self.floor, 0, 0


def new_budgets(clock: Clock, *expected: str, broker: bool = True) -> Budgets:
    return Budgets(clock, broker=broker, expected=frozenset(expected))


def exchange(budgets: Budgets, workers: list[Worker], rounds: int = 12) -> None:
    """Send the heartbeats of all workers, which take all of their budgets immediately."""
    for _ in range(rounds):
        for worker in workers:
            worker.resize(budgets.report(worker.heartbeat()))
            worker.mapped = worker.budget
            worker.live = min(worker.live, worker.mapped)
        assert sum(worker.taken for worker in workers) <= SHARE * len(workers)


@pytest.mark.parametrize("seed", range(50))
def test_budgets_never_exceed_the_memory_of_a_device(seed: int) -> None:
    """Answers get lost, workers are slow or restart, operators set budgets, and the router restarts. The
    device always has all the memory that the workers have or may take."""
    rng = Random(seed)
    clock = Clock()
    floors = {name: rng.randrange(1, 8) * MIB for name in NAMES[: rng.choice([1, 2, 3])]}
    workers = [Worker(name, floor=floor, budget=floor) for name, floor in floors.items()]
    names = [worker.name for worker in workers]
    total = SHARE * len(workers)
    budgets = new_budgets(clock, *names)
    for _ in range(400):
        clock.now_s += rng.random() * 0.3
        worker = rng.choice(workers)
        match rng.random():
            case chance if chance < 0.01:
                worker.restart()
            case chance if chance < 0.015:
                budgets = new_budgets(clock, *names)
            case chance if chance < 0.05:
                _set_by_operator(rng, budgets, worker)
            case chance if chance < 0.15:
                worker.wanted = rng.choice([0, 0, rng.randrange(2 * total)])
            case chance if chance < 0.3:  # it takes memory, or gives some back, or neither
                worker.mapped = rng.randrange(worker.taken) if worker.taken else 0
                worker.live = min(worker.live, worker.mapped)
            case chance if chance < 0.35:  # the connection broke before the answer came
                budgets.report(worker.heartbeat())
            case _:
                worker.resize(budgets.report(worker.heartbeat()))
        assert sum(each.taken for each in workers) <= total


def _set_by_operator(rng: Random, budgets: Budgets, worker: Worker) -> None:
    with suppress(RequestError):
        budgets.set(worker.name, rng.choice([None, rng.randrange(2 * SHARE)]))


def test_budgets_follow_demand_within_a_few_heartbeats() -> None:
    first, second = workers = [Worker(name) for name in NAMES[:2]]
    budgets = new_budgets(Clock())
    exchange(budgets, workers)
    for borrower, lender in ((first, second), (second, first)) * 2:
        borrower.wanted, lender.wanted = 4 * SHARE, 0
        exchange(budgets, workers, rounds=3)
        assert borrower.budget == 2 * SHARE - FLOOR
        assert lender.budget == FLOOR


def test_budgets_keep_devices_and_workers_without_memory_apart() -> None:
    here, there, none = Worker("decode-0"), Worker("decode-1", device="there/cpu"), Worker("decode-2", most=0)
    budgets = new_budgets(Clock())
    here.wanted = 4 * SHARE
    for _ in range(5):
        here.resize(budgets.report(here.heartbeat()))
        there.resize(budgets.report(there.heartbeat()))
        assert budgets.report(none.heartbeat()) is None
    assert (here.budget, there.budget) == (SHARE, SHARE)


def test_budgets_move_no_memory_before_all_expected_workers_report_or_a_timeout() -> None:
    clock = Clock()
    budgets = new_budgets(clock, *NAMES[:2])
    first, second = Worker(NAMES[0], budget=SHARE, wanted=4 * SHARE), Worker(NAMES[1], budget=SHARE)
    assert budgets.report(first.heartbeat()) is None
    assert budgets.report(first.heartbeat()) is None
    assert budgets.report(second.heartbeat()) == FLOOR
    fresh = new_budgets(clock, *NAMES[:2])
    clock.now_s += GATHER_S_MAX
    assert fresh.report(first.heartbeat()) == SHARE


def test_budgets_lend_the_memory_of_a_lost_worker_and_take_it_back() -> None:
    clock = Clock()
    budgets = new_budgets(clock)
    lost, other = workers = [Worker(name) for name in NAMES[:2]]
    exchange(budgets, workers)
    other.wanted = 4 * SHARE
    clock.now_s += LEND_AFTER_S
    budgets_alone = [budgets.report(other.heartbeat()) for _ in range(3)]
    assert budgets_alone == [SHARE] * 3, "it may be frozen"
    clock.now_s += 1.0
    other.resize(budgets.report(other.heartbeat()))
    assert other.budget == 2 * SHARE - FLOOR, "its next incarnation starts with its floor"
    lost.restart()
    lost.wanted = 4 * SHARE
    exchange(budgets, workers)
    assert (lost.budget, other.budget) == (SHARE, SHARE)


def test_budgets_give_more_to_a_cache_under_pressure() -> None:
    clock = Clock()
    budgets = new_budgets(clock)
    busy, idle = workers = [Worker(name) for name in NAMES[:2]]
    exchange(budgets, workers)
    for name in ("evicted_pages_for_resize", "evicted_checkpoints_for_cap", "steps"):
        busy.counters[name] = 5.0
    exchange(budgets, workers)
    assert busy.budget == idle.budget
    for _ in range(30):
        clock.now_s += 1.0
        busy.counters["evicted_pages_for_states"] = clock.now_s
        exchange(budgets, workers, rounds=1)
    assert SHARE // 8 <= idle.budget <= SHARE // 4
    kept = busy.budget
    clock.now_s += PRESSED_S + 1
    exchange(budgets, workers)
    assert busy.budget == kept, "no change without a reason"


@pytest.mark.parametrize("broker", [True, False])
def test_budgets_keep_the_budget_of_an_operator_until_it_is_removed(*, broker: bool) -> None:
    budgets = new_budgets(Clock(), broker=broker)
    pinned, other = workers = [Worker(name) for name in NAMES[:2]]
    exchange(budgets, workers)
    assert budgets.target(pinned.info()) == ("broker" if broker else "share", SHARE)
    budgets.set(pinned.name, 10 * MIB)
    pinned.wanted = 4 * SHARE
    exchange(budgets, workers)
    assert budgets.target(pinned.info()) == ("operator", 10 * MIB)
    assert pinned.budget == 10 * MIB
    assert other.budget == (2 * SHARE - 10 * MIB if broker else SHARE)
    pinned.restart()
    exchange(budgets, workers)
    assert pinned.budget == 10 * MIB, "it survives a restart of the worker"
    budgets.set(pinned.name, None)
    exchange(budgets, workers)
    assert pinned.budget == (2 * SHARE - FLOOR if broker else SHARE)


@pytest.mark.parametrize("broker", [True, False])
def test_budgets_refuse_an_impossible_budget_with_the_reason(*, broker: bool) -> None:
    budgets = new_budgets(Clock(), broker=broker)
    with pytest.raises(RequestError, match="none has reported yet"):
        budgets.set("decode-0", SHARE)
    exchange(budgets, [Worker(name, most=3 * SHARE) for name in NAMES])

    def check_refusal(name: str, budget: int, *words: str) -> None:
        with pytest.raises(RequestError) as caught:
            budgets.set(name, budget)
        assert all(word in str(caught.value) for word in words), caught.value
        assert caught.value.status == (400 if name in NAMES else 404)

    check_refusal("decode-9", SHARE, *NAMES)
    check_refusal("decode-0", FLOOR - 1, f"{FLOOR:,}", "one request of 512 tokens")
    check_refusal("decode-0", 3 * SHARE + 1, "address space", f"{3 * SHARE:,}")
    check_refusal("decode-0", 3 * SHARE, "the other workers")
    budgets.set("decode-0", FLOOR)
    left = 3 * SHARE - FLOOR - (FLOOR if broker else SHARE)
    check_refusal("decode-1", left + 1, f"leaves {left:,}")
    budgets.set("decode-1", left)


TOTAL = 1 << 20
ROUNDS_MAX = 60


def account(
    floor: int = 1 << 10,
    assigned: int = 0,
    live: int = 0,
    wanted: int = 0,
    cached: int = 0,
    **more: Any,  # noqa: ANN401
) -> Account:
    """Return an account of a worker that has taken its assigned budget."""
    budget = max(assigned, floor)
    plain = Account(
        floor_bytes=floor,
        max_bytes=TOTAL,
        budget_bytes=budget,
        assigned_bytes=budget,
        mapped_bytes=budget,
        live_bytes=live,
        wanted_bytes=wanted,
        cached_bytes=cached,
    )
    return replace(plain, **more)


def settle(accounts: dict[str, Account], rounds: int = ROUNDS_MAX) -> dict[str, Account]:
    """Report for all workers in turn, which resize immediately, until nothing changes."""
    for _ in range(rounds):
        before = dict(accounts)
        for name in sorted(accounts):
            budget = rebalance(accounts, TOTAL)[name]
            done = {"assigned_bytes": budget, "budget_bytes": budget, "mapped_bytes": budget}
            accounts = {**accounts, name: replace(accounts[name], **done)}
        assert held_bytes(accounts.values()) <= TOTAL
        if accounts == before:
            return accounts
    raise AssertionError("the budgets do not settle")


def assigned(accounts: dict[str, Account]) -> dict[str, int]:
    return {name: account.assigned_bytes for name, account in accounts.items()}


sizes = st.integers(0, TOTAL * 2)
shares = st.integers(0, TOTAL // 4)


@st.composite
def any_account(draw: st.DrawFn) -> Account:
    """Draw an account at any moment: assigned, reported and mapped bytes need not agree."""
    floor = draw(st.integers(0, TOTAL // 4))
    most = draw(st.integers(floor, TOTAL * 2))
    within = st.integers(floor, most)
    return Account(
        floor_bytes=floor,
        max_bytes=most,
        budget_bytes=draw(within),
        assigned_bytes=draw(within),
        mapped_bytes=draw(sizes),
        live_bytes=draw(sizes),
        cached_bytes=draw(sizes),
        wanted_bytes=draw(sizes),
        pressed=draw(st.booleans()),
        pinned_bytes=draw(st.none() | within),
    )


@given(st.dictionaries(st.sampled_from("abcd"), any_account(), min_size=1))
def test_broker_keeps_all_workers_within_the_device(accounts: dict[str, Account]) -> None:
    budgets = rebalance(accounts, TOTAL)
    assert budgets.keys() == accounts.keys()
    for name, budget in budgets.items():
        assert accounts[name].floor_bytes <= budget <= accounts[name].max_bytes
    after = sum(max(account.held_bytes, budgets[name]) for name, account in accounts.items())
    assert after <= max(TOTAL, held_bytes(accounts.values()))


@st.composite
def demands(draw: st.DrawFn) -> dict[str, Account]:
    """Draw constant demands on a device that is not over-committed."""
    names = "abcd"[: draw(st.integers(1, 4))]
    return {
        name: account(
            floor=draw(st.integers(1, TOTAL // 8)),
            assigned=draw(shares),
            live=draw(sizes),
            wanted=draw(sizes),
            cached=draw(sizes),
            pressed=draw(st.booleans()),
            max_bytes=draw(st.integers(TOTAL // 4, TOTAL)),
        )
        for name in names
    }


@given(demands())
def test_broker_settles_at_constant_demand_and_serves_it_when_it_fits(accounts: dict[str, Account]) -> None:
    after = settle(accounts)
    if sum(account.need_bytes for account in after.values()) <= TOTAL:
        assert all(account.assigned_bytes >= account.need_bytes for account in after.values())
    else:  # no worker gets more than it needs while another one is short
        short = [account for account in after.values() if account.assigned_bytes < account.need_bytes]
        small = TOTAL // len(after) // 16
        for account in after.values():
            above = account.assigned_bytes - account.floor_bytes
            assert above <= max(account.need_bytes - account.floor_bytes, 0) + small
            assert all(above <= other.assigned_bytes - other.floor_bytes + small * 4 for other in short)


def test_broker_counts_lowered_memory_as_free_only_when_it_is_released() -> None:
    accounts = settle({name: account() for name in "ab"})
    accounts["a"] = replace(accounts["a"], wanted_bytes=TOTAL)
    half = TOTAL // 2
    assert rebalance(accounts, TOTAL) == {"a": half, "b": 1024}
    sizes = ("assigned_bytes", "budget_bytes", "mapped_bytes")
    for kind in sizes:
        given: dict[str, Any] = dict.fromkeys(sizes, 1024) | {kind: half}
        accounts["b"] = replace(accounts["b"], **given)
        assert rebalance(accounts, TOTAL)["a"] == half, kind
    accounts["b"] = replace(accounts["b"], mapped_bytes=1024)
    assert rebalance(accounts, TOTAL)["a"] == TOTAL - 1024


def test_broker_takes_unused_memory_before_a_cache() -> None:
    third = TOTAL // 3
    accounts = {
        "wants": account(assigned=third, wanted=third + TOTAL // 8),
        "caches": account(assigned=third, cached=third),
        "idle": account(assigned=third),
    }
    after = assigned(settle(accounts))
    assert after["caches"] == third
    assert after["idle"] < third


@pytest.mark.parametrize("seed", range(5))
def test_broker_ignores_small_changes_of_demand(seed: int) -> None:
    rng = Random(seed)
    base = {"a": TOTAL // 4, "b": TOTAL // 3}
    accounts = settle({name: account(live=live, cached=TOTAL) for name, live in base.items()})
    first = assigned(accounts)
    for _ in range(20):
        for name, live in base.items():
            accounts[name] = replace(accounts[name], live_bytes=live + rng.randrange(-2000, 2000))
        accounts = settle(accounts)
        assert assigned(accounts) == first


def test_broker_meets_a_varying_demand_beside_an_overload() -> None:
    rng = Random(1)
    accounts = settle({"small": account(live=TOTAL // 4), "huge": account(wanted=2 * TOTAL)})
    for _ in range(40):
        live = TOTAL // 4 + rng.randrange(-2000, 2000)
        accounts["small"] = replace(accounts["small"], live_bytes=live)
        before, accounts = accounts, settle(accounts)
        assert accounts["small"].assigned_bytes >= live
        assert accounts["small"].assigned_bytes >= before["small"].assigned_bytes
