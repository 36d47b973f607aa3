"""Cut a weight for tensor parallelism: the rows or columns of each rank. Pure.

ByHeads(4, (8,))        | h0 | h1 | h2 | h3 |        2 ranks: h0 h1 | h2 h3; 8 ranks: two have each head
ByHeads(2, (4, 4, 8))   | q0 | q1 | k0 | k1 | v0 | v1 |    rank 0 of 2: q0 k0 v0, end to end
ByHeadRuns(((2, 4), (1, 2)))  | h0 | h1 | g0 |    rank 0 of 2: h0 g0; rank 1: h1 g0
EvenRuns()                | 3 rows | 3 rows | 2 rows + 1 of zeros |        8 rows on 3 ranks
EvenRuns(runs=2)          | gate | up |    rank 0 of 2: first half of gate, first half of up, end to end
EvenRuns(step=2)          | g0 u0 | g1 u1 | g2 u2 |    pairs stay together: rank 0 of 2: g0 u0 g1 u1
OneRank(3, 4)         the fourth of 4 experts: all of it on rank 1 of 2, nothing on rank 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, assert_never

from tidemill.kvstore.shards import heads_fit


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank has all of it."""

    dim: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class ByHeads:
    """Dimension `dim` has runs of these numbers of rows, each of which is `count` equal heads.

    A rank has as many heads of each run as the next; where ranks outnumber heads, neighbours share one.
    """

    count: int
    runs: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class ByHeadRuns:
    """The rows are runs of (heads, rows). As in ByHeads, but each run has its own number of heads."""

    runs: tuple[tuple[int, int], ...]
    dim: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class EvenRuns:
    """Dimension `dim` is `runs` equal runs. Every rank has the same number of rows of each, in multiples of
    `step`, the first for rank 0; the end is padded with zeros."""

    runs: int = 1
    dim: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class OneRank:
    """The rank with tensor `position` of `count`, which ranks share evenly and in order, has all of it. The
    others have nothing, or `zeros`: of a bias that is added once."""

    position: int = 0
    count: int = 1
    zeros: bool = False
    dim: ClassVar[int] = 0


Cut = Replicated | ByHeads | ByHeadRuns | EvenRuns | OneRank


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a model that rank `index` of `size` has.

    sums        of projections back into the hidden width a rank has the columns of its own inputs, and ranks
                add up what they compute; else it has some of the outputs
    by_expert   a rank has some experts whole; else columns of each expert. It needs `sums`
    """

    index: int = 0
    size: int = 1
    sums: bool = False
    by_expert: bool = False

    def __str__(self) -> str:
        """Return the way in which groups of this kind add up, empty for that of one rank."""
        return "" if not self.sums else "fast by expert" if self.by_expert else "fast"


@dataclass(frozen=True, slots=True)
class RankSlice:
    """The part of one rank: half-open ranges of dimension `dim` of the tensor, end to end, each followed by
    `zeros` rows of zeros."""

    ranges: tuple[tuple[int, int], ...]
    zeros: int = 0
    dim: int = 0

    def is_all(self, shape: Sequence[int]) -> bool:
        """Return whether it is all of a tensor of this shape."""
        return self.ranges == ((0, shape[self.dim]),) and not self.zeros


def part_of(cut: Cut, rows: int, index: int, size: int) -> RankSlice:
    """Return the part of rank `index` of `size`, for a tensor with `rows` in the dimension that is cut."""
    match cut:
        case Replicated():
            return RankSlice(((0, rows),))
        case ByHeads(count, runs, dim):
            assert sum(runs) == rows
            return RankSlice(_runs([(count, run) for run in runs], index, size), dim=dim)
        case ByHeadRuns(runs):
            assert sum(run for _, run in runs) == rows
            return RankSlice(_runs(runs, index, size))
        case EvenRuns(runs, dim, step):
            assert rows % (runs * step) == 0
            run_rows = rows // runs
            share = -(-run_rows // (step * size)) * step
            start, end = min(run_rows, index * share), min(run_rows, (index + 1) * share)
            ranges = ((run * run_rows + start, run * run_rows + end) for run in range(runs))
            return RankSlice(tuple(ranges), share - (end - start), dim)
        case OneRank(position, count, zeros):
            if position * size // count == index:
                return RankSlice(((0, rows),))
            return RankSlice(((0, 0),), rows if zeros else 0)
        case _:
            assert_never(cut)


def _runs(runs: Sequence[tuple[int, int]], index: int, size: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    start = 0
    for count, rows in runs:
        assert heads_fit(count, size)
        head_rows, rest = divmod(rows, count)
        assert not rest
        first = start + index * count // size * head_rows
        found.append((first, first + max(1, count // size) * head_rows))
        start += rows
    return tuple(found)
