"""What a model asks of a checkpoint: the shape of each of its tensors and how ranks share it. Pure."""

from dataclasses import dataclass

from tidemill.workers.models.loading.sharding import Cut, RankSlice, part_of


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as the model knows it, whole and not quantised, however the folder stores it."""

    shape: tuple[int, ...]
    cut: Cut

    def part(self, index: int, size: int) -> RankSlice:
        """What rank `index` of `size` has of it."""
        return part_of(self.cut, self.shape[self.cut.dim], index, size)
