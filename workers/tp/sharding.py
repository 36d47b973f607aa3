"""How a weight is cut for tensor parallelism: which of its rows a rank has. Pure.

Heads(4, (8,))        | h0 | h1 | h2 | h3 |        2 ranks: h0 h1 | h2 h3; 8 ranks: two have each head
Heads(2, (4, 4, 8))   | q0 | q1 | k0 | k1 | v0 | v1 |    rank 0 of 2: q0 k0 v0, end to end
Even()                | 3 rows | 3 rows | 2 rows + 1 of zeros |        8 rows on 3 ranks
"""

from dataclasses import dataclass
from typing import assert_never


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank has all of it."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The rows are runs of so many rows, each of which is `count` equal heads.

    A rank has as many heads of each run as the next; where ranks outnumber heads, neighbours share one.
    """

    count: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Even:
    """As many rows for each rank, the first for rank 0; what is missing at the end is filled with zeros."""


Cut = Whole | Heads | Even


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one rank: half-open ranges of the tensor's, end to end, then rows of zeros."""

    ranges: tuple[tuple[int, int], ...]
    zeros: int = 0


def part_of(cut: Cut, rows: int, index: int, size: int) -> Part:
    """What rank `index` of `size` has of a tensor of `rows`."""
    match cut:
        case Whole():
            return Part(((0, rows),))
        case Heads(count, runs):
            assert sum(runs) == rows
            assert heads_fit(count, size)
            return Part(
                tuple(_heads(count, runs, run, index * count // size, size) for run in range(len(runs)))
            )
        case Even():
            share = -(-rows // size)
            start, end = min(rows, index * share), min(rows, (index + 1) * share)
            return Part(((start, end),), share - (end - start))
        case _:
            assert_never(cut)


def heads_fit(count: int, size: int) -> bool:
    """Whether each of `size` ranks can have as many of `count` heads, or one, each in as many copies."""
    return count % size == 0 or size % count == 0


def _heads(count: int, runs: tuple[int, ...], run: int, first: int, size: int) -> tuple[int, int]:
    head_rows, rest = divmod(runs[run], count)
    assert not rest
    start = sum(runs[:run]) + first * head_rows
    return start, start + max(1, count // size) * head_rows
