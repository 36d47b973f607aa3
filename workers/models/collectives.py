"""The exchange between the ranks of a tensor-parallel group inside a forward pass, as its model sees it.

No sum is split over ranks: each computes whole columns, which are concatenated. So a group has the same bits
as one process. Every rank makes the same calls in the same order.
"""

from typing import Protocol

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

    def gather_to_leader(self, x_TN: torch.Tensor, width: int) -> torch.Tensor:
        assert x_TN.shape[1] == width
        return x_TN

    def broadcast(self, x: torch.Tensor) -> None:
        """Do nothing: there is no other rank."""


ALONE: Ranks = Alone()
