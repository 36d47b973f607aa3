"""The exchange between the ranks of a tensor-parallel group inside a forward pass, as its model sees it.

Ranks exchange columns, which are concatenated: then no sum is split over ranks, and a group has the bits of
one process. Or they add up terms, in fewer exchanges: then the last bits depend on the number of ranks
(decision 52). Every rank makes the same calls in the same order.
"""

from typing import NamedTuple, Protocol

import torch

LEADER = 0


class Ranks(Protocol):
    """This rank in its group. All calls raise GroupBroken when a rank is gone or late."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        """Return the columns of all ranks side by side, by index, on every rank: `[T, width]`, packed.

        x_TN    as large on every rank, T > 0; columns from `width` on are padding of the last ranks, and
        dropped
        """
        ...

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors of all ranks, which has the same bits on each of them. May overwrite
        `x_TN`."""
        ...

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        """`gather` on the leader, `[T, 0]` on the other ranks."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy the leader's `x`, packed, into that of every rank."""
        ...


class Alone:
    """A group of one: no exchange."""

    index = LEADER
    size = 1

    def gather(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        assert x_TN.shape[1] == width
        return x_TN

    def reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        return x_TN

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        assert x_TN.shape[1] == width
        return x_TN

    def broadcast(self, x: torch.Tensor) -> None:
        """Do nothing: there is no other rank."""


ALONE: Ranks = Alone()


class Sharing(NamedTuple):
    """The ranks that share a model, and the part of each.

    sums        ranks add up terms; else they gather columns
    by_expert   each rank has whole experts; it needs `sums`
    """

    ranks: Ranks = ALONE
    sums: bool = False
    by_expert: bool = False


WHOLE = Sharing()
