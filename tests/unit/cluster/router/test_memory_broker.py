"""Memory between the workers of a device: never more than there is, never back and forth, to who needs it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.router.memory_broker import Account, held_bytes, rebalance

TOTAL = 1 << 20
ROUNDS_MAX = 60


def account(
    floor: int = 1 << 10, told: int = 0, live: int = 0, wanted: int = 0, cached: int = 0, **more: int | bool
) -> Account:
    """Told, and has done it."""
    told = max(told, floor)
    plain = Account(
        floor_bytes=floor,
        max_bytes=TOTAL,
        budget_bytes=told,
        told_bytes=told,
        mapped_bytes=told,
        live_bytes=live,
        wanted_bytes=wanted,
        cached_bytes=cached,
    )
    return replace(plain, **more)


def settle(accounts: dict[str, Account], rounds: int = ROUNDS_MAX) -> dict[str, Account]:
    """Everybody reports in turn and does at once what it is told; fails when it does not come to rest."""
    for _ in range(rounds):
        before = dict(accounts)
        for name in sorted(accounts):
            told = rebalance(accounts, TOTAL)[name]
            done = {"told_bytes": told, "budget_bytes": told, "mapped_bytes": told}
            accounts = {**accounts, name: replace(accounts[name], **done)}
        assert held_bytes(accounts.values()) <= TOTAL
        if accounts == before:
            return accounts
    raise AssertionError("it does not come to rest")


def told(accounts: dict[str, Account]) -> dict[str, int]:
    return {name: entry.told_bytes for name, entry in accounts.items()}


sizes = st.integers(0, TOTAL * 2)
shares = st.integers(0, TOTAL // 4)


@st.composite
def any_account(draw: st.DrawFn) -> Account:
    """In the middle of anything: what was told, read, done and given back need not agree."""
    floor = draw(st.integers(0, TOTAL // 4))
    most = draw(st.integers(floor, TOTAL * 2))
    within = st.integers(floor, most)
    return Account(
        floor_bytes=floor,
        max_bytes=most,
        budget_bytes=draw(within),
        told_bytes=draw(within),
        mapped_bytes=draw(sizes),
        live_bytes=draw(sizes),
        cached_bytes=draw(sizes),
        wanted_bytes=draw(sizes),
        pressed=draw(st.booleans()),
        pinned_bytes=draw(st.none() | within),
    )


@given(st.dictionaries(st.sampled_from("abcd"), any_account(), min_size=1))
def test_what_all_may_have_taken_stays_within_the_device(accounts: dict[str, Account]) -> None:
    budgets = rebalance(accounts, TOTAL)
    assert budgets.keys() == accounts.keys()
    for name, budget in budgets.items():
        assert accounts[name].floor_bytes <= budget <= accounts[name].max_bytes
    after = sum(max(entry.held_bytes, budgets[name]) for name, entry in accounts.items())
    assert after <= max(TOTAL, held_bytes(accounts.values()))


@st.composite
def demands(draw: st.DrawFn) -> dict[str, Account]:
    """Constant demands on a device that is not over-committed."""
    names = "abcd"[: draw(st.integers(1, 4))]
    return {
        name: account(
            floor=draw(st.integers(1, TOTAL // 8)),
            told=draw(shares),
            live=draw(sizes),
            wanted=draw(sizes),
            cached=draw(sizes),
            pressed=draw(st.booleans()),
            max_bytes=draw(st.integers(TOTAL // 4, TOTAL)),
        )
        for name in names
    }


@given(demands())
def test_constant_demand_comes_to_rest_and_is_served_when_it_fits(accounts: dict[str, Account]) -> None:
    after = settle(accounts)
    if sum(held.need_bytes for held in after.values()) <= TOTAL:
        assert all(held.told_bytes >= held.need_bytes for held in after.values())
    else:  # nobody gets more than it needs while another one is short
        short = [held for held in after.values() if held.told_bytes < held.need_bytes]
        trifle = TOTAL // len(after) // 16
        for held in after.values():
            above = held.told_bytes - held.floor_bytes
            assert above <= max(held.need_bytes - held.floor_bytes, 0) + trifle
            assert all(above <= other.told_bytes - other.floor_bytes + trifle * 4 for other in short)


def test_idle_workers_share_all_there_is() -> None:
    assert told(settle({name: account() for name in "ab"})) == {"a": TOTAL // 2, "b": TOTAL // 2}
    assert told(settle({"a": account(), "b": account(max_bytes=TOTAL // 4)})) == {
        "a": TOTAL * 3 // 4,
        "b": TOTAL // 4,
    }


def test_all_memory_goes_to_the_one_that_wants_it_and_back() -> None:
    accounts = settle({name: account() for name in "abc"})
    for busy in "abcab":
        for name, held in accounts.items():
            accounts[name] = replace(held, wanted_bytes=2 * TOTAL if name == busy else 0, cached_bytes=TOTAL)
        accounts = settle(accounts, rounds=4)
        assert told(accounts) == {name: TOTAL - 2048 if name == busy else 1024 for name in "abc"}


def test_a_word_to_give_back_frees_nothing_until_it_is_done() -> None:
    accounts = settle({name: account() for name in "ab"})
    accounts["a"] = replace(accounts["a"], wanted_bytes=TOTAL)
    half = TOTAL // 2
    assert rebalance(accounts, TOTAL) == {"a": half, "b": 1024}
    for still in ("told_bytes", "budget_bytes", "mapped_bytes"):
        given = {"told_bytes": 1024, "budget_bytes": 1024, "mapped_bytes": 1024, still: half}
        accounts["b"] = replace(accounts["b"], **given)
        assert rebalance(accounts, TOTAL)["a"] == half, still
    accounts["b"] = replace(accounts["b"], mapped_bytes=1024)
    assert rebalance(accounts, TOTAL)["a"] == TOTAL - 1024


def test_a_short_cache_grows_into_memory_that_others_have_no_use_for() -> None:
    half = TOTAL // 2
    accounts = {
        "busy": account(told=half, live=half // 4, cached=half // 2, pressed=True),
        "idle": account(told=half, cached=half // 2),
    }
    after = told(settle(accounts))
    assert after["busy"] > TOTAL * 7 // 8
    assert after["idle"] >= TOTAL // 16


def test_two_short_caches_keep_what_they_have() -> None:
    accounts = {
        "a": account(told=TOTAL * 3 // 4, cached=TOTAL, pressed=True),
        "b": account(told=TOTAL // 4, cached=TOTAL, pressed=True),
    }
    assert told(settle(accounts)) == told(accounts)


def test_unused_memory_is_taken_before_a_cache() -> None:
    third = TOTAL // 3
    accounts = {
        "wants": account(told=third, wanted=third + TOTAL // 8),
        "caches": account(told=third, cached=third),
        "idle": account(told=third),
    }
    after = told(settle(accounts))
    assert after["caches"] == third
    assert after["idle"] < third


@pytest.mark.parametrize("seed", range(5))
def test_small_ups_and_downs_move_nothing(seed: int) -> None:
    rng = Random(seed)
    base = {"a": TOTAL // 4, "b": TOTAL // 3}
    accounts = settle({name: account(live=live, cached=TOTAL) for name, live in base.items()})
    first = told(accounts)
    for _ in range(20):
        for name, live in base.items():
            accounts[name] = replace(accounts[name], live_bytes=live + rng.randrange(-2000, 2000))
        accounts = settle(accounts)
        assert told(accounts) == first


def test_a_demand_that_wavers_beside_an_overload_is_met_and_not_lowered() -> None:
    rng = Random(1)
    accounts = settle({"small": account(live=TOTAL // 4), "huge": account(wanted=2 * TOTAL)})
    for _ in range(40):
        live = TOTAL // 4 + rng.randrange(-2000, 2000)
        accounts["small"] = replace(accounts["small"], live_bytes=live)
        before, accounts = accounts, settle(accounts)
        assert accounts["small"].told_bytes >= live
        assert accounts["small"].told_bytes >= before["small"].told_bytes


def test_a_device_that_holds_too_much_gives_all_of_it_back() -> None:
    """As after a worker came back that was thought to be dead."""
    over = TOTAL // 2 + 4000
    accounts = {name: account(told=over) for name in "ab"}
    assert sum(rebalance(accounts, TOTAL).values()) <= TOTAL


def test_a_person_overrules_demand() -> None:
    accounts = {
        "pinned": account(told=TOTAL // 2, live=TOTAL // 2, pinned_bytes=TOTAL // 4),
        "other": account(told=TOTAL // 2, wanted=TOTAL),
    }
    assert told(settle(accounts)) == {"pinned": TOTAL // 4, "other": TOTAL * 3 // 4}
    accounts["pinned"] = replace(accounts["pinned"], pinned_bytes=TOTAL // 2 + 3)
    assert told(settle(accounts)) == {"pinned": TOTAL // 2 + 3, "other": TOTAL // 2 - 3}
