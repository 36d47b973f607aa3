"""Data for the operators' tests: rows of mixed lengths, paged memory, and what counts as equal."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill.kernels.shared.compute_dtype import ComputeDtype

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The limits of the relative error by dtype."""

COMPUTE_DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class Step:
    """Implements `Rows`."""

    cu_B1: torch.Tensor
    lens_B: torch.Tensor
    pages_BN: torch.Tensor
    read_B: torch.Tensor
    writes_BK: torch.Tensor

    def to(self, device: str | torch.device) -> "Step":
        return Step(*(tensor.to(device) for tensor in vars(self).values()))


def int32(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(
    new: Sequence[int],
    before: Sequence[int] | None = None,
    pages: torch.Tensor | None = None,
    read: Sequence[int] | None = None,
    writes: Sequence[Sequence[int]] | None = None,
) -> Step:
    """Rows of `new` tokens after `before` tokens; without states, row b starts empty and writes state b."""
    before = before or [0] * len(new)
    return Step(
        cu_B1=torch.tensor([0, *new]).cumsum(0).to(torch.int32),
        lens_B=int32([old + n for old, n in zip(before, new, strict=True)]),
        pages_BN=torch.zeros(len(new), 1, dtype=torch.int32) if pages is None else pages,
        read_B=int32(read or [-1] * len(new)),
        writes_BK=int32(writes or [[b] for b in range(len(new))]),
    )


def slots_inside(new: Sequence[int], *slots: dict[int, int]) -> list[list[int]]:
    """Return `writes` of rows of `new` tokens: each row's slots for its states by their depth in the row."""
    kept = max(new)
    return [
        [row.get(n - kept + 1 + column, -1) for column in range(kept)]
        for n, row in zip(new, slots, strict=True)
    ]


def shuffled_pages(lens: Sequence[int], page_tokens: int, draw: torch.Generator) -> torch.Tensor:
    """Return a page table `[B, N]` in which no page follows its neighbour; unused entries name an unused
    page."""
    counts = [-(-n // page_tokens) for n in lens]
    order = torch.randperm(sum(counts), generator=draw).to(torch.int32) + 1
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    start = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[start : start + count]
        start += count
    return table


def random(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `wanted`; NaN where either has one."""
    difference = (found.double() - wanted.double()).square().sum()
    return float((difference / wanted.double().square().sum()).sqrt())


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    integer = {4: torch.int32, 2: torch.int16}[first.element_size()]
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))
