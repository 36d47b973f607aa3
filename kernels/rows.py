"""What an operator reads of a step: which tokens form a row, and where its pages and states are."""

from typing import Protocol

import torch


class Rows(Protocol):
    """B rows with T tokens in all; row b is tokens `[cu[b], cu[b + 1])`, the last of its sequence so far.

    cu_B1       int32, row starts; cu[B] = T
    lens_B      int32, tokens of the sequence, those of the row included
    pages_BN    int32, page ids of each sequence, left to right, covering `lens` tokens
    read_B      int32, state id to start from, -1 for the empty state
    write_B     int32, state id that receives the state after the row; may equal read
    """

    @property
    def cu_B1(self) -> torch.Tensor: ...
    @property
    def lens_B(self) -> torch.Tensor: ...
    @property
    def pages_BN(self) -> torch.Tensor: ...
    @property
    def read_B(self) -> torch.Tensor: ...
    @property
    def write_B(self) -> torch.Tensor: ...


def integers(values_N: torch.Tensor) -> list[int]:
    """The values as a list; torch's own `tolist` has no type."""
    return [int(value) for value in values_N.unbind()]
