"""The tensors that a model needs: the shape of each, and how ranks share it. Pure."""

from dataclasses import dataclass

from tidemill.workers.models.loading.sharding import Cut, RankSlice, part_of


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as the model knows it, whole and not quantised, whatever its encoding in the folder."""

    shape: tuple[int, ...]
    cut: Cut

    def part(self, index: int, size: int) -> RankSlice:
        """Return the part of rank `index` of `size`."""
        return part_of(self.cut, self.shape[self.cut.dim], index, size)
