"""Weights as a folder stores them, which layers reorder and `pack` joins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Literal, TypeAlias

import torch
from torch.nn import functional

from tidemill.kernels.shared.compute_dtype import ComputeDtype

CodeKind: TypeAlias = Literal["int8", "w8a8", "fp8", "int4", "uint4", "fp4"]
Kind: TypeAlias = Literal["float32", "bfloat16"] | CodeKind

FOUR_BITS: dict[Kind, tuple[float, ...]] = {
    "int4": tuple(range(-8, 8)),
    "uint4": tuple(range(16)),
    "fp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
"""The number for each code of a kind of 4 bits; uint8 holds two codes of a row, the first below. `int8` and
`fp8` (e4m3, without NaN) are the torch types int8 and float8_e4m3fn. `w8a8` is int8 with one scale for each
row, without offsets, whose products have x in 8 bits too (`integer_product` of reference.py)."""


PIECE = 1 << 18
"""The number of values that are computed before they are rounded: they fit a core's cache."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of weights, `[.., N, K]`, or a vector. A value is a code's number times its scale, in float32,
    then plus its offset: columns have both in G groups, of equal size, for each row.

    codes    [.., N, K] as `kind` has them, of 4 bits [.., N, K / 2]; of floats the values themselves
    scales   [.., N, G], float32; None: the codes are the values
    offsets  [.., N, G], float32, or None
    """

    codes: torch.Tensor
    kind: Kind
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        return self.codes.shape[-1] * (2 if self.kind in FOUR_BITS else 1)

    @property
    def group(self) -> int:
        """The columns that share a scale, 0 without scales."""
        return 0 if self.scales is None else self.columns // self.scales.shape[-1]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.offsets) if part is not None)

    @property
    def values(self) -> torch.Tensor:
        """The values, `[.., N, K]`: of codes in float32, else as they are."""
        if self.scales is None:
            return self.codes
        numbers, groups = self._numbers(), self.scales.shape[-1]
        found = numbers.view(*numbers.shape[:-1], groups, -1) * self.scales[..., None]
        if self.offsets is not None:
            found = found + self.offsets[..., None]
        return found.view(numbers.shape)

    def factors(self, compute_dtype: ComputeDtype) -> torch.Tensor:
        """Return the values as products take them: bfloat16 if they are stored so, or are codes and products
        are in bfloat16."""
        if self.scales is None:
            return self.codes
        dtype = torch.bfloat16 if compute_dtype == "bfloat16" else torch.float32
        rows = self.moved(lambda tensor: tensor.flatten(0, -2))
        found = torch.empty(len(rows.codes), self.columns, dtype=dtype, device=self.codes.device)
        step = max(1, PIECE // self.columns)
        for start in range(0, len(found), step):
            piece = rows.moved(lambda tensor, start=start: tensor[start : start + step])
            found[start : start + step] = piece.values
        return found.view(*self.codes.shape[:-1], self.columns)

    @property
    def widened(self) -> "Stored":
        """The same as floats, in bfloat16 if it is codes."""
        return plain(self.factors("bfloat16"))

    @property
    def weight_only(self) -> "Stored":
        """The same for products that leave x as it is."""
        return replace(self, kind="int8") if self.kind == "w8a8" else self

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Stored":
        """Return it with its rows, or whole groups of columns, where `move` moves them. `move` gets codes,
        scales and offsets, which have equal rows."""
        scales, offsets = (None if part is None else move(part) for part in (self.scales, self.offsets))
        return Stored(move(self.codes), self.kind, scales, offsets)

    def _numbers(self) -> torch.Tensor:
        if self.kind not in FOUR_BITS:
            return self.codes.float()
        return functional.embedding(self.codes.int(), _pairs(self.kind, self.codes.device)).flatten(-2)


PAIRS = {
    kind: torch.tensor([(numbers[byte & 15], numbers[byte >> 4]) for byte in range(256)]).float()
    for kind, numbers in FOUR_BITS.items()
}
"""The two numbers in each byte, `[256, 2]`. Made here, since a step that is recorded may make no tensors."""


@cache
def _pairs(kind: Kind, device: torch.device) -> torch.Tensor:
    return PAIRS[kind].to(device)


def has_nan(tensor: torch.Tensor) -> bool:
    """Return whether codes, scales or values hold NaN."""
    if tensor.dtype == torch.float8_e4m3fn:
        return bool((tensor.view(torch.uint8) & 127 == 127).any())
    # The sum is one pass over memory.
    return tensor.dtype.is_floating_point and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def plain(values: torch.Tensor) -> Stored:
    """Return values that are stored as they are, in float32 if they are not bfloat16."""
    is_half = values.dtype == torch.bfloat16
    return Stored(values, "bfloat16" if is_half else "float32")


def runs(parts: Sequence[Stored]) -> Iterator[Stored]:
    """Yield the parts, neighbours of one kind and size of groups joined by rows."""
    for _, same in groupby(parts, lambda part: (part.kind, part.group, part.offsets is None)):
        yield join(list(same))


def join(parts: Sequence[Stored], dim: int = -2) -> Stored:
    """Return the parts, one below the other, or along another dimension; of several kinds `widened`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(part.kind, part.group, part.offsets is None) for part in parts}) > 1:
        return plain(torch.cat([part.factors("bfloat16") for part in parts], dim))

    def joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(found, dim) if found else None

    codes = torch.cat([part.codes for part in parts], dim)
    scales, offsets = joined([part.scales for part in parts]), joined([part.offsets for part in parts])
    return Stored(codes, first.kind, scales, offsets)


def stack(parts: Sequence[Stored]) -> Stored:
    """Return `[P, .., N, K]` of P parts of equal shape: the experts of a layer."""
    return join([part.moved(lambda rows: rows[None]) for part in parts], 0)
