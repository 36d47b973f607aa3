"""The tensors that a model needs: the shape of each, and how ranks share it. Pure."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidemill.workers.models.loading.sharding import Cut, EvenRuns, OneRank, RankPart, RankSlice, part_of

Role: TypeAlias = Literal["matrix", "vocabulary", "precise"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as the model knows it, whole and not quantised, whatever its encoding in the folder.

    terms       the cut where ranks add up; None: the same
    by_expert   the cut where ranks have whole experts; None: as without
    role        `--quantization` leaves vectors and "precise" ones, those that choose or gate, as floats, and
                decides on a "vocabulary", of embedding and head, apart
    transposed  folders have its floats, not its codes, with the last two dimensions exchanged
    """

    shape: tuple[int, ...]
    cut: Cut
    terms: Cut | None = None
    by_expert: Cut | None = None
    transposed: bool = False
    role: Role = "matrix"

    def part(self, rank: RankPart) -> RankSlice:
        """Return the part of a rank."""
        cut = self.terms if rank.sums and self.terms else self.cut
        cut = self.by_expert if rank.by_expert and self.by_expert else cut
        return part_of(cut, self.shape[cut.dim], rank.index, rank.size)


def projection_back(hidden: int, inner: int) -> Weight:
    """Return the weight of a projection back into the hidden width, whose inputs ranks share evenly."""
    return Weight((hidden, inner), EvenRuns(), terms=EvenRuns(dim=1))


def bias_back(hidden: int) -> Weight:
    """Return its bias, which is added once."""
    return Weight((hidden,), EvenRuns(), terms=OneRank(zeros=True))
