"""Credits that clients ask for: how long they keep an entry, who pays, and what they leave to others."""

from itertools import count
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kvstore.indexes import PAGE_BYTES, STATE_BYTES, a_layout, an_index, keys_of
from tidemill.kvstore.layout import PageId, StateId
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.prefix_index import RETAINED_USES, PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.kvstore.memory.retention import NOTES_MAX, Retention

PLENTY = 1 << 20
STEP = PAGE_BYTES + STATE_BYTES


class Retained:
    """An index of at most `most` bytes, and the credits on its entries, as a cache uses them."""

    def __init__(self, *, hybrid: bool = True, policy: Policy = "value", most: int = PLENTY) -> None:
        self.index: PrefixIndex = an_index(hybrid=hybrid, policy=policy)
        self.retention = Retention(self.index, a_layout(hybrid=hybrid), lambda: most)
        self._hybrid = hybrid
        self._serial = count()

    def insert(self, path: str) -> Entry:
        """Insert a path with a checkpoint at its end, unless they are there; return the last entry."""
        entries: list[Entry] = []
        for key in keys_of(path):
            page = PageId(next(self._serial))
            entries.append(self.index.insert(entries[-1] if entries else None, key, page)[0])
        if self._hybrid and entries[-1].checkpoint is None:
            self.index.keep_checkpoint(entries[-1], Checkpoint((StateId(next(self._serial)),)))
        for entry in reversed(entries):
            self.index.unpin(entry)
        return entries[-1]

    def retain(self, path: str, retain_s: float = 100, *, tenant: str = "", name: str = "") -> None:
        """Retain a path with all its checkpoints."""
        entries = self.index.match(keys_of(path)).path
        self.retention.retain(tenant, name, entries, retain_s, set(range(len(path))))
        self.check()

    def use(self, path: str) -> None:
        entries = self.index.match(keys_of(path)).path
        self.index.use(entries)
        self.retention.renew(entries)

    def advance(self, now_s: float) -> None:
        self.retention.advance(now_s)
        self.check()

    def release(self, tenant: str, name: str) -> None:
        self.retention.release(tenant, name)
        self.check()

    def evict(self) -> str | None:
        entry = self.index.cheapest_leaf()
        if entry is None:
            return None
        self.index.age(self.index.credit(entry) if self.index.is_restorable(entry) else 0.0)
        self.retention.forget(entry)
        self.index.remove(entry)
        self.check()
        return entry.key.decode()

    def check(self) -> None:
        self.index.check()
        self.retention.check()


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_entry_with_a_credit_outlasts_later_ones(policy: Policy, hybrid: bool) -> None:  # noqa: FBT001
    kept = Retained(hybrid=hybrid, policy=policy)
    kept.insert("a")
    kept.retain("a")
    for letter in "bcdefghijk":
        kept.insert(letter)
    assert [kept.evict() for _ in range(10)] == list("bcdefghijk")
    assert kept.evict() == "a", "a credit is no pin"


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_credit_that_has_ended_changes_nothing(policy: Policy) -> None:
    """The order is that of an index without credits, also where the entry was a candidate before."""
    kept = Retained(policy=policy)
    kept.insert("a")
    kept.retain("a")
    for letter in "bcd":
        kept.insert(letter)
    assert kept.index.cheapest_leaves(9)[-1].key == b"a"
    kept.advance(100)
    assert [kept.evict() for _ in range(4)] == list("abcd")


def test_credit_fades_and_a_use_renews_it() -> None:
    kept = Retained()
    entry = kept.insert("a")
    once = kept.index.credit(entry)
    kept.retain("a")
    assert kept.index.credit(entry) == once * (1 + RETAINED_USES)
    kept.advance(75)
    assert kept.index.credit(entry) == once * (1 + RETAINED_USES / 4)
    kept.use("a")
    assert kept.index.credit(entry) == once * (2 + RETAINED_USES)
    kept.advance(174)
    assert kept.index.credit(entry) > 2 * once
    kept.advance(175)
    assert kept.index.credit(entry) == 2 * once
    assert not kept.retention.total_bytes()


def test_entry_that_is_used_often_outlasts_a_credit() -> None:
    kept = Retained()
    kept.insert("a")
    for _ in range(2 * RETAINED_USES):
        kept.use("a")
    kept.insert("b")
    kept.retain("b")
    assert kept.evict() == "b"


def test_session_retains_its_last_prompt_alone() -> None:
    kept = Retained()
    entries = [kept.insert(path) for path in ("a", "b", "c")]
    kept.retain("a", name="s")
    kept.retain("a", name="t")
    kept.retain("b", name="s")
    assert entries[0].retained_s, "another session retains it too"
    kept.retain("c", name="t")
    assert [entry.retained_s for entry in entries] == [0, 100, 100]
    kept.retain("b", 10, name="s")
    kept.retain("c", 10, name="t")
    kept.advance(10)
    assert not kept.retention.total_bytes(), "the latest request decides how long"
    entries = [kept.insert(path) for path in ("d", "de", "def")]
    kept.retain("de", name="s")
    kept.retention.retain("", "s", kept.index.match(keys_of("def")).path, 100, {1})
    assert [entry.retained_s for entry in entries] == [100, 0, 100], "what the prompts share"


def test_released_name_keeps_what_others_asked_for() -> None:
    kept = Retained()
    first, second = kept.insert("a"), kept.insert("ab")
    kept.retain("ab", name="s")
    kept.retention.retain("", "", kept.index.match(keys_of("ab")).path, 100, set())
    kept.release("else", "s")
    assert first.retained_s, "the name of another tenant"
    kept.release("", "s")
    assert [first.retained_s, second.retained_s] == [0, 100]


def test_tenant_pays_each_page_of_its_paths_once() -> None:
    kept = Retained()
    kept.insert("aab")
    kept.insert("aac")
    kept.retain("aab", tenant="t", name="b")
    kept.retain("aac", tenant="t")
    assert kept.retention.paid_bytes("t") == 4 * PAGE_BYTES + 2 * STATE_BYTES
    kept.release("t", "b")
    assert kept.retention.paid_bytes("t") == 3 * PAGE_BYTES + STATE_BYTES


def test_greedy_tenant_leaves_a_share_to_each_other() -> None:
    """Alone it gets half; with a second tenant each gets a third, once each has asked again."""
    kept = Retained(most=12 * STEP)
    entries = [kept.insert(letter) for letter in ascii_lowercase]
    for letter in ascii_lowercase[:20]:
        kept.retain(letter, tenant="greedy")
    assert kept.retention.paid_bytes("greedy") == 6 * STEP
    assert [bool(entry.retained_s) for entry in entries[:20]] == [False] * 14 + [True] * 6, (
        "the oldest lose it"
    )
    for _ in range(8):
        for letter in ascii_lowercase[20:]:
            kept.retain(letter, tenant="modest")
        kept.retain("a", tenant="greedy")
    assert kept.retention.paid_bytes("modest") == kept.retention.paid_bytes("greedy") == 4 * STEP


def test_prompt_beyond_its_share_retains_its_beginning() -> None:
    kept = Retained(most=4 * STEP)
    entries = [kept.insert("aaaa"[:size]) for size in range(1, 5)]
    kept.retain("aaaa")
    assert [bool(entry.retained_s) for entry in entries] == [True, True, False, False]


def test_evicted_checkpoint_loses_its_credit() -> None:
    kept = Retained()
    entry = kept.insert("a")
    kept.retain("a", name="s")
    kept.retention.forget(entry)
    kept.index.drop_checkpoint(entry)
    kept.check()
    kept.insert("a")
    assert not entry.retained_s
    kept.retain("a", name="s")
    kept.advance(99)
    assert entry.retained_s


def test_notes_of_dropped_credits_are_bounded() -> None:
    kept = Retained()
    for letter in "ab":
        kept.insert(letter)
    for number in range(4 * NOTES_MAX):
        kept.retain("ab"[number % 2], name="s")
    assert len(kept.retention._ends) <= NOTES_MAX + 4


PATHS = st.text("ab", min_size=1, max_size=4)
TENANTS = st.sampled_from("xy")
ACTIONS = st.one_of(
    st.tuples(st.just("insert"), PATHS),
    st.tuples(st.just("use"), PATHS),
    st.tuples(st.just("retain"), PATHS, TENANTS, st.sampled_from(["", "s", "t"]), st.integers(1, 9)),
    st.tuples(st.just("release"), TENANTS, st.sampled_from(["s", "t"])),
    st.tuples(st.just("wait"), st.integers(1, 5)),
    st.just(("evict",)),
)


@given(st.booleans(), st.lists(ACTIONS, max_size=40))
def test_tenants_pay_exactly_what_they_retain(hybrid: bool, actions: list[tuple[object, ...]]) -> None:  # noqa: FBT001
    """Any order of calls leaves index and accounts consistent, and no tenant above its share."""
    most = 6 * STEP
    kept = Retained(hybrid=hybrid, most=most)
    now_s = 0
    for action in actions:
        match action:
            case "insert", str(path):
                kept.insert(path)
            case "use", str(path):
                kept.use(path)
            case "retain", str(path), str(tenant), str(name), int(retain_s):
                kept.retain(path, retain_s, tenant=tenant, name=name)
                assert kept.retention.paid_bytes(tenant) + kept.retention.total_bytes() <= most
            case "release", str(tenant), str(name):
                kept.release(tenant, name)
            case "wait", int(wait_s):
                now_s += wait_s
                kept.advance(now_s)
            case _:
                kept.evict()
    kept.advance(now_s + 9)
    assert not kept.retention.total_bytes()
    assert all(kept.index.rank(entry) == entry.score for entry in kept.index)
