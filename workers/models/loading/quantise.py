"""Quantise matrices while they are read: `--quantization`. Rounded to the nearest code, without calibration.

A matrix is quantised whole and then cut, so all ranks have the codes of one rank. What is read from the file
is in small pieces: the memory is that of the codes.
"""

from dataclasses import dataclass
from math import gcd, prod

import torch

from tidemill.kernels.linear.stored import PIECE, CodeKind, Stored, stack
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.models.loading.weights import Weight

MOST: dict[CodeKind, float] = {"fp8": 448.0, "int8": 127.0, "w8a8": 127.0, "int4": -8.0}
"""The code of the largest value of a block. That of 4 bits becomes -8 whatever its sign, as in ggml's Q4_0:
all 16 codes are used."""

DTYPES: dict[CodeKind, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "w8a8": torch.int8,
    "int4": torch.uint8,
}

COLUMNS_MIN = 16
"""The fewest columns of a block: with fewer, scales take as much as codes save."""

SCALE_MIN = 2.0**-90
"""The least scale that all variants take."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The rows and columns that share a scale, 0 for all. `vocabulary` is the recipe of embedding and head;
    None: they stay floats, as in vLLM."""

    kind: CodeKind
    rows: int = 1
    columns: int = 0
    vocabulary: "Recipe | None" = None

    def columns_of(self, weight: Weight) -> int:
        """Return the columns that share a scale in this weight."""
        return gcd(self.columns, weight.shape[-1])

    def num_bytes(self, weight: Weight) -> int:
        """Return the size of the codes and scales of this weight."""
        *rows, columns = weight.shape
        per_row = columns * (4 if self.kind == "int4" else 8) // 8 + 4 * columns // self.columns_of(weight)
        return prod(rows) * per_row


RECIPES: dict[Quantization, Recipe] = {
    "fp8": Recipe("fp8", vocabulary=Recipe("fp8")),
    "int8": Recipe("int8", vocabulary=Recipe("int8")),
    "w8a8": Recipe("w8a8", vocabulary=Recipe("int8")),
    "int4": Recipe("int4", columns=32, vocabulary=Recipe("int8")),
    "fp8_per_tensor": Recipe("fp8", rows=0),
    "fp8_per_channel": Recipe("fp8"),
    "fp8_per_block": Recipe("fp8", rows=128, columns=128),
    "int8_per_channel_weight_only": Recipe("int8"),
    "w8a8_int8": Recipe("w8a8"),
}


def recipe_of(weight: Weight, quantization: Quantization | None) -> Recipe | None:
    """Return the recipe of a weight; None: it stays floats, as vectors do, and what is narrow or precise."""
    if quantization is None or weight.role == "precise" or len(weight.shape) == 1:
        return None
    recipe = RECIPES[quantization]
    chosen = recipe.vocabulary if weight.role == "vocabulary" else recipe
    fits = chosen is not None and chosen.columns_of(weight) >= COLUMNS_MIN and weight.shape[-1] % 2 == 0
    return chosen if fits else None


def floats_bytes(weight: Weight, quantization: Quantization | None, float_bytes: int) -> int:
    """Return the size in memory of a weight that is stored in floats, which take `float_bytes`."""
    recipe = recipe_of(weight, quantization)
    return prod(weight.shape) * float_bytes if recipe is None else recipe.num_bytes(weight)


def quantised(whole: Stored, recipe: Recipe) -> Stored:
    """Return floats `[.., N, K]` as codes, in memory of their own."""
    floats_NK = whole.codes
    if floats_NK.dim() > 2:
        return stack([quantised(Stored(matrix, whole.kind), recipe) for matrix in floats_NK])
    rows, columns = floats_NK.shape
    group = gcd(recipe.columns, columns)
    step = max(1, PIECE // columns)
    spans = [slice(start, start + step) for start in range(0, rows, step)]

    def grouped(span: slice) -> torch.Tensor:
        piece = floats_NK[span].float()
        return piece.reshape(len(piece), -1, group)

    largest_NG = torch.cat([_largest(grouped(span), recipe.kind) for span in spans])
    for start in range(0, rows, recipe.rows or rows):
        block = largest_NG[start : start + (recipe.rows or rows)]
        block[:] = block.amax(0)
    scales_NG = largest_NG / MOST[recipe.kind]
    scales_NG = scales_NG.where(scales_NG.abs() >= SCALE_MIN, SCALE_MIN)
    width = columns // 2 if recipe.kind == "int4" else columns
    codes = torch.empty(rows, width, dtype=DTYPES[recipe.kind])
    for span in spans:
        codes[span] = _codes(grouped(span) / scales_NG[span][..., None], recipe.kind).flatten(1)
    return Stored(codes, recipe.kind, scales_NG)


def _largest(groups_NGC: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Return the size of the largest value of each group, with its sign where codes have no other half."""
    if kind != "int4":
        return groups_NGC.abs().amax(-1)
    return groups_NGC.gather(-1, groups_NGC.abs().argmax(-1, keepdim=True))[..., 0]


def _codes(numbers: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Return the nearest codes; overwrite the numbers."""
    if kind == "fp8":
        return numbers.to(torch.float8_e4m3fn)
    if kind != "int4":
        return numbers.round_().to(torch.int8)
    nibbles = numbers.round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4
