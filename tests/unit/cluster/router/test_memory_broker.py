"""The memory broker: stays within the device, follows demand, and does not oscillate."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.router.memory_broker import Account, held_bytes, rebalance

TOTAL = 1 << 20
ROUNDS_MAX = 60


def account(
    floor: int = 1 << 10,
    assigned: int = 0,
    live: int = 0,
    wanted: int = 0,
    cached: int = 0,
    **more: int | bool,
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


def test_broker_shares_all_memory_among_idle_workers() -> None:
    assert assigned(settle({name: account() for name in "ab"})) == {"a": TOTAL // 2, "b": TOTAL // 2}
    assert assigned(settle({"a": account(), "b": account(max_bytes=TOTAL // 4)})) == {
        "a": TOTAL * 3 // 4,
        "b": TOTAL // 4,
    }


def test_broker_moves_all_memory_to_the_busy_worker_and_back() -> None:
    accounts = settle({name: account() for name in "abc"})
    for busy in "abcab":
        for name, idle in accounts.items():
            accounts[name] = replace(idle, wanted_bytes=2 * TOTAL if name == busy else 0, cached_bytes=TOTAL)
        accounts = settle(accounts, rounds=4)
        assert assigned(accounts) == {name: TOTAL - 2048 if name == busy else 1024 for name in "abc"}


def test_broker_counts_lowered_memory_as_free_only_when_it_is_released() -> None:
    accounts = settle({name: account() for name in "ab"})
    accounts["a"] = replace(accounts["a"], wanted_bytes=TOTAL)
    half = TOTAL // 2
    assert rebalance(accounts, TOTAL) == {"a": half, "b": 1024}
    for field in ("assigned_bytes", "budget_bytes", "mapped_bytes"):
        given = {"assigned_bytes": 1024, "budget_bytes": 1024, "mapped_bytes": 1024, field: half}
        accounts["b"] = replace(accounts["b"], **given)
        assert rebalance(accounts, TOTAL)["a"] == half, field
    accounts["b"] = replace(accounts["b"], mapped_bytes=1024)
    assert rebalance(accounts, TOTAL)["a"] == TOTAL - 1024


def test_broker_grows_a_short_cache_into_unused_memory() -> None:
    half = TOTAL // 2
    accounts = {
        "busy": account(assigned=half, live=half // 4, cached=half // 2, pressed=True),
        "idle": account(assigned=half, cached=half // 2),
    }
    after = assigned(settle(accounts))
    assert after["busy"] > TOTAL * 7 // 8
    assert after["idle"] >= TOTAL // 16


def test_broker_keeps_the_budgets_of_two_short_caches() -> None:
    accounts = {
        "a": account(assigned=TOTAL * 3 // 4, cached=TOTAL, pressed=True),
        "b": account(assigned=TOTAL // 4, cached=TOTAL, pressed=True),
    }
    assert assigned(settle(accounts)) == assigned(accounts)


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


def test_broker_frees_an_over_committed_device() -> None:
    """A worker that was thought to be lost may come back."""
    over = TOTAL // 2 + 4000
    accounts = {name: account(assigned=over) for name in "ab"}
    assert sum(rebalance(accounts, TOTAL).values()) <= TOTAL


def test_broker_prefers_the_budget_of_an_operator_to_demand() -> None:
    accounts = {
        "pinned": account(assigned=TOTAL // 2, live=TOTAL // 2, pinned_bytes=TOTAL // 4),
        "other": account(assigned=TOTAL // 2, wanted=TOTAL),
    }
    assert assigned(settle(accounts)) == {"pinned": TOTAL // 4, "other": TOTAL * 3 // 4}
    accounts["pinned"] = replace(accounts["pinned"], pinned_bytes=TOTAL // 2 + 3)
    assert assigned(settle(accounts)) == {"pinned": TOTAL // 2 + 3, "other": TOTAL // 2 - 3}
