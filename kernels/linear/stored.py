"""Weights as a folder stores them, which layers reorder and `pack` joins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of weights, `[.., N, K]`, or a vector; a value is a code times its scale.

    codes    [.., N, K] as `kind` has them: of floats the values themselves
    scales   [.., N, groups of columns], float32; None: the codes are the values
    """

    codes: torch.Tensor
    kind: Kind
    scales: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """The values, in the type of a float kind."""
        assert self.scales is None, "no kind of today has scales"
        return self.codes

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Stored":
        """Return it with its rows, or whole groups of columns, where `move` moves them. `move` gets codes and
        scales, which have equal rows."""
        return Stored(move(self.codes), self.kind, None if self.scales is None else move(self.scales))


def plain(values: torch.Tensor) -> Stored:
    """Return values that are stored as they are, in float32 if they are not bfloat16."""
    is_half = values.dtype == torch.bfloat16
    return Stored(values, "bfloat16" if is_half else "float32")


def join(parts: Sequence[Stored], dim: int = -2) -> Stored:
    """Return the parts, one below the other, or along another dimension; of several kinds as floats."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({part.kind for part in parts}) > 1:
        return plain(torch.cat([part.values for part in parts], dim))
    scales = [part.scales for part in parts if part.scales is not None]
    codes = torch.cat([part.codes for part in parts], dim)
    return Stored(codes, first.kind, torch.cat(scales, dim) if scales else None)


def stack(parts: Sequence[Stored]) -> Stored:
    """Return `[P, .., N, K]` of P parts of equal shape: the experts of a layer."""
    return join([part.moved(lambda rows: rows[None]) for part in parts], 0)
