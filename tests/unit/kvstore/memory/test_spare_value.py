"""The value of spare checkpoints: the rate of junctions, the credit by it, and their place among others."""

from collections.abc import Sequence
from random import Random

import pytest

from tests.support.kvstore.indexes import (
    PAGE_BYTES,
    STATE_BYTES,
    a_layout,
    an_index,
    insert_path,
    keys_of,
)
from tidemill.kvstore.layout import StateId
from tidemill.kvstore.memory.entry import Checkpoint
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.kvstore.memory.spare_value import PROMPTS_MAX, SpareValue

UNIT = 4 * 4 / STATE_BYTES
"""The credit after 4 pages at one junction a page: 4 junctions, each of which saves 4 tokens."""


class Seen:
    """An index, and the value of its spare checkpoints."""

    def __init__(self, policy: Policy = "value") -> None:
        self.index = an_index(hybrid=True, policy=policy)
        self.spares = SpareValue(self.index, a_layout(hybrid=True))

    def meet(self, path: str, num_pages: int = 0) -> float:
        """Record a prompt of at least `path` that resumes where it can; return the rate."""
        match = self.index.match(keys_of(path))
        self.spares.add_prompt(match.path, match.restorable_pages, max(num_pages, len(path)))
        return self.spares.junctions_per_page


@pytest.mark.parametrize(
    ("start", "depth", "width", "saved"),
    [
        (0, 4, 4, 4),
        (0, 8, 8, 8),
        (0, 12, 4, 4),
        (0, 24, 8, 8),
        (0, 64, 64, 64),
        (62, 64, 64, 2),
        (8, 12, 4, 4),
    ],
)
def test_credit_is_of_the_junctions_behind_it_and_the_pages_before_it(
    start: int, depth: int, width: int, saved: int
) -> None:
    """Both are as many as it is round; the pages before it end at the checkpoint there."""
    value = Seen().spares
    assert value.credit(start, depth) == 0
    value.junctions_per_page = 0.5
    assert value.credit(start, depth) == 0.5 * width * saved / STATE_BYTES


@pytest.mark.parametrize(
    ("kept", "dropped", "again", "rate", "policy"),
    [
        (".....x", (), "aaaaab", 1 / 5, "value"),
        ("...s.x", (3,), "aaaaab", 1 / 5, "value"),  # a spare one was evicted, and missed
        (".....x", (), "aaab", 0, "value"),  # leaves the path before the grid,
        (".....x", (), "aaaaaa", 0, "value"),  # at a checkpoint,
        (".....x", (), "aaaaaab", 0, "value"),  # where it ends,
        (".....x", (), "b", 0, "value"),  # or shares nothing
        ("...x.x", (3,), "aaaaab", 0, "value"),  # memory was short: a spare one would be gone as well
        ("....xx", (4,), "aaaaab", 0, "value"),
        (".....x", (), "aaaaab", 0, "lru"),
    ],
)
def test_rate_counts_junctions_where_a_spare_checkpoint_was_missed(
    kept: str, dropped: Sequence[int], again: str, rate: float, policy: Policy
) -> None:
    seen = Seen(policy)
    entries = insert_path(seen.index, "aaaaaa", checkpoints=kept)
    for position in dropped:
        seen.index.drop_checkpoint(entries[position])
    assert seen.meet(again, 10) == rate
    assert seen.spares.credit(0, 4) == pytest.approx(UNIT * rate)


def test_spare_checkpoint_that_is_used_gives_others_a_credit() -> None:
    seen = Seen()
    index = seen.index
    insert_path(index, "aaaaaa", checkpoints="...s.x")
    seen.meet("aaaabb", 14)
    assert seen.spares.junctions_per_page == 1 / 10
    index.use(index.match(keys_of("aaaa")).path)
    seen.meet("aaaacc", 14)
    assert seen.spares.junctions_per_page == 1 / 20, "it counts once: then it is valued by its uses"


def test_junction_does_not_count_when_its_spare_checkpoint_would_be_gone() -> None:
    seen = Seen()
    index = seen.index
    insert_path(index, "aaaaaa", checkpoints=".....x")
    index.age(UNIT / 4)
    seen.meet("aaaaab", 10)
    assert seen.spares.junctions_per_page == 0, "one in 5 pages: less than the 1 in 4 that it needs"
    for _ in range(3):
        seen.meet("aaaaab", 6)
    assert seen.spares.junctions_per_page == 4 / 8, "four in 8 pages"


def test_rate_is_the_largest_that_proves_itself() -> None:
    """By its definition: this many junctions a page need no more, and of no larger rate this is true."""
    rng = Random(1)
    for _ in range(50):
        seen, clock = Seen(), 0.0
        index = seen.index
        born: dict[str, float] = {}
        for letter in "abcdefgh":
            insert_path(index, letter * 6, checkpoints=".....x")
            born[letter] = clock
            aged = rng.choice((0.0, 0.001, 0.01, 0.05))
            index.age(aged)
            clock += aged
        needed: list[float] = []
        pages = 0
        for letter in rng.choices(list(born), k=20):
            needed.append((clock - born[letter]) / UNIT)
            num_pages = rng.randrange(6, 30)
            pages += num_pages - 5
            seen.meet(letter * 5 + "z", num_pages)
        rates = [count / pages for count in range(len(needed) + 1)]
        proven = [rate for count, rate in enumerate(rates) if sum(need <= rate for need in needed) >= count]
        assert seen.spares.junctions_per_page == max(proven)


def test_old_prompts_are_forgotten() -> None:
    seen = Seen()
    index = seen.index
    insert_path(index, "aaaaaa", checkpoints=".....x")
    seen.meet("aaaaab", 10)
    for _ in range(PROMPTS_MAX - 1):
        seen.meet("b", 10)
    assert seen.spares.junctions_per_page > 0
    seen.meet("b", 10)
    assert seen.spares.junctions_per_page == 0


def test_spare_checkpoint_has_its_credit_until_the_clock_has_passed_it() -> None:
    seen = Seen()
    index = seen.index
    entry = insert_path(index, "aaaa")[-1]
    index.keep_checkpoint(entry, Checkpoint((StateId(5),)), spare=True, credit=2.0)
    assert index.credit(entry) == 2
    index.age(1.5)
    assert index.credit(entry) == 0.5
    index.use([entry])
    value = 4 / (4 * PAGE_BYTES + STATE_BYTES)
    assert index.credit(entry) == pytest.approx(value), "by its uses, as any other"
    index.check()


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_spare_checkpoints_go_first_until_they_are_used(policy: Policy) -> None:
    index = an_index(hybrid=True, policy=policy)
    first, *_ = insert_path(index, "aaaa", checkpoints="s..x")
    second, *_ = insert_path(index, "bbbb", checkpoints="s...")
    assert index.cheapest_checkpoint() is first, "the older one"
    assert index.credit(first) == 0
    index.use([first])
    assert index.credit(first) > 0
    assert index.cheapest_checkpoint() is second


def test_spare_checkpoint_takes_no_value_from_those_below_it() -> None:
    index = an_index(hybrid=True)
    spare, _, last = insert_path(index, "aaa", checkpoints="s.x")
    alone = insert_path(index, "bbb", checkpoints="..x")[-1]
    assert index.credit(last) == index.credit(alone)
    index.use([spare])
    below = insert_path(index, "aaac", checkpoints="...x")[-1]
    index.drop_checkpoint(last)
    index.drop_checkpoint(below)
    index.keep_checkpoint(below, Checkpoint((StateId(99),)))
    assert below.saved_flops == 3, "a used one does"
