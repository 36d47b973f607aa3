"""The shape of a step for an operator: the tokens of each row, and its pages and states."""

from typing import Protocol

import torch

MANY_ROWS = 256
"""Up to this limit a device has the same kernels for any number of rows."""

Made = dict[object, torch.Tensor]
"""The tensors that an operator makes of the rows of a step, once for all layers that share them."""


class Rows(Protocol):
    """B rows with T tokens in all; row b is tokens `[cu[b], cu[b + 1])`, the last of its sequence so far.

    cu_B1       int32, row starts; cu[B] = T
    lens_B      int32, tokens of the sequence, those of the row included; 0: the row is the padding of a
                batch, which stores nothing, and has -1 for its states
    pages_BN    int32, page ids of each sequence, left to right, covering `lens` tokens
    read_B      int32, state id to start from, -1 for the empty state
    writes_BK   int32, packed, K >= 1, state ids that receive the states after the last K tokens of the row,
                the last column after its last token; -1: that one is not kept. A row of fewer tokens has -1
                in its columns on the left

    The ids that a row writes differ, and no other row reads or writes them; one may equal its own `read`.
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
    def writes_BK(self) -> torch.Tensor: ...


def rows_at_once(rows: int) -> int:
    """A power of two, at least the rows. Kernels are compiled for each: nearly always it is the same."""
    return max(MANY_ROWS, 1 << (rows - 1).bit_length())


def integers(values_N: torch.Tensor) -> list[int]:
    """The values as a list; torch's own `tolist` has no type."""
    return [int(value) for value in values_N.unbind()]


def slots_after(rows: Rows) -> dict[int, int]:
    """Return the state id that receives the state of each token that is kept, by the token's index in the
    batch."""
    starts = integers(rows.cu_B1)
    slots: dict[int, int] = {}
    for b, writes_K in enumerate(rows.writes_BK.unbind()):
        for token, slot in enumerate(integers(writes_K), starts[b + 1] - len(writes_K)):
            if slot >= 0:
                assert token >= starts[b], "a state from before the row"
                slots[token] = slot
    return slots


def rounded_after(rows: Rows, round_tokens: int) -> set[int]:
    """Return the indices in the batch of the tokens after which a state is rounded to bfloat16: each
    `round_tokens`-th of its sequence; 0: none."""
    starts, lens = integers(rows.cu_B1), integers(rows.lens_B)
    found: set[int] = set()
    for start, end, length in zip(starts, starts[1:], lens, strict=False):
        depths = range(length - (end - start) + 1, length + 1)
        found |= {start + at for at, depth in enumerate(depths) if round_tokens and not depth % round_tokens}
    return found


def wide(state: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state in the type of sums."""
    return state.to(torch.promote_types(state.dtype, torch.float32), copy=True)
