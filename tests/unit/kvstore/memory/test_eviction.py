"""Which victim is chosen, in small drawn situations; and that memory is refused only when nothing would help.

Two pages of two tokens, or one state, make an extent unless a test says otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kvstore.leases import ROOT, P, a_cache, could_serve
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import StateId
from tidemill.kvstore.memory import eviction
from tidemill.kvstore.memory.arena import Id
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import Checkpoint, Entry


def keep(cache: Cache, path: str, *, worth: float | None = None, held: str = "") -> list[Entry]:
    """Keep the pages of `path`, a letter each, and a checkpoint of this credit at the end of it.

    Of them stay pinned as many pages as `held` has h, and the checkpoint if it has an x.
    """
    entries: list[Entry] = []
    for key in (PageKey(path[:end].encode()) for end in range(1, len(path) + 1)):
        page = cache.arena.pages.take()
        entry, taken_over = cache.insert(entries[-1] if entries else None, key, page)
        if not taken_over:
            cache.free_page(page)
        entries.append(entry)
    if worth is not None:
        last = entries[-1]
        cache.keep_checkpoint(last, Checkpoint(cache.arena.states.take()))
        last.score = (worth, 0)
        cache.pin_checkpoint(last)
        if "x" not in held:
            cache.unpin_checkpoint(last)
    for entry in reversed(entries[held.count("h") :]):
        cache.unpin(entry)
    check(cache)
    return entries


def check(cache: Cache) -> None:
    cache.index.check()
    entries = list(cache.index)
    pages = [entry for entry in entries if entry.pins], [entry for entry in entries if not entry.pins]
    there = [entry for entry in entries if entry.checkpoint is not None]
    held = [state_of(entry) for entry in there if entry.checkpoint_pins]
    kept = [state_of(entry) for entry in there if not entry.checkpoint_pins]
    held_pages, kept_pages = ([entry.page for entry in some] for some in pages)
    cache.arena.check((held_pages, kept_pages), (held, kept))


def state_of(entry: Entry) -> StateId:
    assert entry.checkpoint is not None
    assert entry.checkpoint.state is not None
    return entry.checkpoint.state


def names(cache: Cache) -> set[str]:
    return {entry.key.decode() for entry in cache.index}


def checkpoints(cache: Cache) -> set[str]:
    return {entry.key.decode() for entry in cache.index if entry.checkpoint is not None}


def test_a_page_takes_the_place_of_one_that_leads_to_no_checkpoint() -> None:
    cache = a_cache(4)
    keep(cache, "ab", worth=1)
    keep(cache, "cd")
    keep(cache, "abe")  # into the last extent, and worthless below a checkpoint
    cache.take_page()
    cache.take_page()
    assert names(cache) == {"a", "ab", "c", "abe"}
    assert checkpoints(cache) == {"ab"}
    cache.take_page()
    cache.take_page()
    assert names(cache) == {"a", "ab"}


def test_a_state_takes_the_extent_of_worthless_pages_and_no_checkpoint() -> None:
    cache = a_cache(4)
    keep(cache, "ab", worth=1)
    keep(cache, "cd", worth=2)
    with pytest.raises(OutOfMemory):
        cache.arena.states.take()
    (first, last) = cache.index.match([PageKey(b"c"), PageKey(b"cd")]).path
    cache.drop_checkpoint(last, "test")
    cache.free_state(cache.take_state())  # it had a place of its own
    held = [cache.take_state(), cache.take_state()]
    assert checkpoints(cache) == {"ab"}
    assert names(cache) == {"a", "ab"}
    assert cache.arena.pages.extent_of(first.page) in {cache.arena.states.extent_of(state) for state in held}


def test_a_page_empties_an_extent_of_states_that_are_worth_less_than_the_cheapest_leaf() -> None:
    cache = a_cache(5, states_per_extent=2)
    keep(cache, "abcd", worth=90)
    keep(cache, "efgh", worth=90)
    for path in ("a", "e"):
        (entry,) = cache.index.match([PageKey(path.encode())]).path
        cache.keep_checkpoint(entry, Checkpoint(cache.arena.states.take()))
    for path in ("a", "e"):
        cache.index.match([PageKey(path.encode())]).path[0].score = (0.001, 0)
    cheap = {state_of(entry) for entry in cache.index if entry.key in {b"a", b"e"}}
    assert {state // 2 for state in cheap} == {cache.arena.states.extent_of(state) for state in cheap}
    assert cache.arena.usage().state_extents == 2
    cache.take_page()  # the extent that is left
    for _ in range(3):
        cache.take_page()
    assert checkpoints(cache) == {"a", "e", "abcd", "efgh"}
    cache.take_page()
    assert checkpoints(cache) == {"abcd", "efgh"}
    assert names(cache) == {"a", "ab", "abc", "abcd", "e", "ef", "efg", "efgh"}
    assert cache.arena.usage().state_extents == 1


def test_a_leaf_goes_when_the_states_beside_the_cheapest_checkpoint_are_held() -> None:
    """Nothing is gained by half an extent of the other class."""
    cache = a_cache(2, states_per_extent=2)
    keep(cache, "ab", worth=1)
    keep(cache, "cd", worth=5, held="hhx")
    cache.take_page()
    assert names(cache) == {"a", "c", "cd"}
    assert checkpoints(cache) == {"cd"}


def test_a_state_takes_the_place_of_the_cheapest_checkpoint() -> None:
    cache = a_cache(6)
    for path, worth in (("ab", 3), ("cd", 2), ("ef", 4)):
        keep(cache, path, worth=worth, held="h")
    for left in ({"ab", "ef"}, {"ef"}, set[str]()):
        cache.take_state()
        assert checkpoints(cache) == left
        assert names(cache) == {"a", "ab", "c", "cd", "e", "ef"}, "an entry can lose only its checkpoint"
    with pytest.raises(OutOfMemory):
        cache.take_state()


def test_what_hangs_below_the_pages_of_an_extent_goes_with_them() -> None:
    """Leaves first. The pages of `ab` and `x` share an extent; `abcd` hangs below, in another one."""
    cache = a_cache(3)
    keep(cache, "a", held="h")
    keep(cache, "y", held="h")
    keep(cache, "ab")
    keep(cache, "x")
    keep(cache, "abcd")
    victim = eviction.for_state(cache.index, cache.arena, cache.layout)
    assert victim is not None
    assert [entry.key for entry in victim.entries[:2]] == [b"abcd", b"abc"]
    assert {entry.key for entry in victim.entries[2:]} == {b"ab", b"x"}
    cache.take_state()
    assert names(cache) == {"a", "y"}


def test_an_extent_costs_what_is_lost_with_it_per_byte_that_comes_free() -> None:
    """Two checkpoints whose eviction frees two pages and a state each."""
    cache = a_cache(2, states_per_extent=2)
    entries = keep(cache, "ab", worth=6)[-1], keep(cache, "cd", worth=1)[-1]
    victim = eviction.for_extent(cache.index, cache.arena, cache.layout)
    assert victim is not None
    assert set(victim.checkpoints_only) == set(entries)
    assert victim.price == (6 + 1) / 2


def test_an_extent_is_emptied_unless_each_one_holds_something() -> None:
    cache = a_cache(5)
    keep(cache, "ab", worth=1, held="h")
    keep(cache, "cd", worth=2, held="hhx")
    victim = eviction.for_extent(cache.index, cache.arena, cache.layout)
    assert victim is not None
    assert [entry.key for entry in victim.checkpoints_only] == [b"ab"]
    assert not victim.entries
    assert not cache.resize(1)
    assert names(cache) == {"a", "ab", "c", "cd"}
    assert eviction.for_extent(cache.index, cache.arena, cache.layout) is None
    assert eviction.for_page(cache.index, cache.arena, cache.layout) == eviction.Victim(
        entries=tuple(entry for entry in cache.index if entry.key == b"ab")
    )


def until_refused(take: Callable[[], Id]) -> Iterator[Id]:
    with suppress(OutOfMemory):
        while True:
            yield take()


@pytest.mark.parametrize("held", ["", "h", "hh", "hhh", "hhhx"])
def test_nothing_that_is_pinned_ever_goes(held: str) -> None:
    cache = a_cache(4, states_per_extent=2)
    keep(cache, "abc", worth=1, held=held)
    keep(cache, "def", worth=9)
    pages = list(until_refused(cache.take_page))
    states = list(until_refused(cache.take_state))
    assert names(cache) == {"abc"[: end + 1] for end in range(held.count("h"))}
    assert checkpoints(cache) == ({"abc"} if "x" in held else set())
    cache.check(pages, states)


def test_the_clock_follows_what_is_evicted() -> None:
    cache = a_cache(4)
    cheap = keep(cache, "ab", worth=2, held="h")[-1]
    dear = keep(cache, "cd", worth=5, held="h")[-1]
    cache.take_state()
    assert cheap.checkpoint is None
    assert cache.index.credit(dear) == 3


class Situation:
    """Leases that hold this and that of a small memory, and what others have left behind."""

    def __init__(self, random: Random) -> None:
        self.random = random
        hybrid = random.random() < 0.8
        extents, window = random.randint(2, 8), random.choice([0, 0, 1, P + 1, 3 * P])
        self.cache = a_cache(extents, random.randint(1, 3), hybrid=hybrid, window=window)
        self.ledger = Ledger(self.cache)
        self.leases: dict[str, Lease] = {}
        for number in range(random.randint(1, 10)):
            self._come(f"r{number}")
            if self.leases and random.random() < 0.4:
                name = random.choice(list(self.leases))
                del self.leases[name]
                self.ledger.release(name)
        if random.random() < 0.3:
            self.ledger.resize(random.randint(1, self.cache.arena.num_extents))

    def _come(self, name: str) -> None:
        random = self.random
        tokens = [random.randint(0, 1) for _ in range(random.randint(1, 9))]
        keys = page_keys(ROOT, tokens, P)
        lease = self.leases[name] = self.ledger.open(name, spare_slots_min=random.randint(0, 1))
        match = self.ledger.index.match(keys[: (len(tokens) - 1) // P])
        self.ledger.attach(lease, match, match.restorable_pages)
        start = lease.committed
        cut = random.randrange(start + 1, len(tokens) + 1)
        for end in {cut // P * P, cut} - {start}:
            if end > lease.committed and not self._step(lease, end, keys):
                return

    def _step(self, lease: Lease, end: int, keys: list[PageKey]) -> bool:
        try:
            self.ledger.reserve(lease, end)
        except OutOfMemory:
            return False
        self.ledger.launch(lease, end)
        self.ledger.commit(lease, end, keys)
        if end % P == 0:
            self.ledger.keep_state(lease, last=self.random.random() < 0.5)
        return True


@settings(deadline=None, derandomize=True, max_examples=1500)
@given(seed=st.integers(0, 2**32), num_tokens=st.integers(1, 40), drafts=st.integers(0, 4))
def test_memory_is_refused_only_when_everything_that_is_not_held_would_not_do(
    seed: int, num_tokens: int, drafts: int
) -> None:
    """Wherever it lies, whatever it is worth. And what is refused has cost nobody anything."""
    situation = Situation(Random(seed))
    cache, ledger = situation.cache, situation.ledger
    lease = ledger.open("new")
    slots = 1 + drafts if cache.layout.has_states else 0
    pages = -(-num_tokens // P)
    views = pages if cache.layout.has_windows else 0
    possible = could_serve(cache, situation.leases.values(), slots, pages, views)
    kept, before = (names_of(cache), cache.arena.usage()), ledger.counters.copy()
    try:
        ledger.reserve(lease, num_tokens, drafts=drafts)
    except OutOfMemory:
        assert not possible
        assert (names_of(cache), cache.arena.usage(), ledger.counters) == (*kept, before)
        assert not [*lease.private_pages, *lease.spare_slots, *lease.windows]
    else:
        assert (len(lease.private_pages), len(lease.spare_slots), len(lease.windows)) == (pages, slots, views)
    ledger.check()


def names_of(cache: Cache) -> set[tuple[PageKey, Checkpoint | None]]:
    return {(entry.key, entry.checkpoint) for entry in cache.index}
