"""Read stored tensors as codes with scales. A part of a tensor has exactly the values of the whole.

Matrices become floats where codes cannot say what they are: columns in groups of unequal size or in another
order, parts that cut a group into small ones, and numbers of no kind (e5m2).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import gcd
from typing import TypeAlias

import torch

from tidemill.kernels.linear.stored import Kind, Stored, join, plain, stack
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.encodings import (
    BYTES,
    EIGHT_BITS,
    Coded,
    Encoding,
    Matrix,
    Plain,
    Scheme,
    Stacked,
    bits_of,
    grid_of,
    steps_of,
)
from tidemill.workers.models.loading.quantise import Recipe, quantised
from tidemill.workers.models.loading.sharding import RankSlice

Open: TypeAlias = Callable[[str], torch.Tensor]
"""Returns a stored tensor by name."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of 8 columns."""

GROUP_STEP = 8
"""The columns of the smallest group that a cut leaves: with fewer, scales take as much as codes save."""


def read_part(
    encoding: Encoding,
    shape: tuple[int, ...],
    scheme: Scheme | None,
    stored: Open,
    part: RankSlice,
    recipe: Recipe | None = None,
) -> Stored:
    """Return the part of a tensor of `shape`, in memory of its own. Floats are bfloat16 if they are stored so
    or were codes, else float32; with a recipe they become codes."""

    def whole(matrix: Matrix, shape: tuple[int, ...]) -> Stored:
        found = _whole(matrix, shape, scheme, stored)
        return found if recipe is None else quantised(found, recipe)

    if not isinstance(encoding, Stacked):
        found = whole(encoding, shape)
        return found if recipe is not None and part.is_all(shape) else cut(found, part)
    experts, (count, rows, columns) = encoding.experts, shape
    below = (rows // len(experts[0]), columns)
    ranges, each = (part.ranges, RankSlice(((0, rows),)))
    if part.dim:
        ranges, each = ((0, count),), replace(part, dim=part.dim - 1)
    matrices = [
        cut(join([whole(matrix, below) for matrix in experts[expert]]), each)
        for start, end in ranges
        for expert in range(start, end)
    ]
    return stack(matrices)


def cut(whole: Stored, part: RankSlice) -> Stored:
    """Return a part of a tensor, in memory of its own. Where it cuts groups of columns, smaller groups have
    their scales; without such groups codes become floats, in float32."""
    if whole.scales is None or part.dim < whole.codes.dim() - 1:
        return whole.moved(lambda tensor: picked(tensor, part))
    columns, is_w8a8 = whole.columns, whole.kind == "w8a8"  # of which zeros have any scale
    is_one = is_w8a8 or (whole.scales.shape[-1] == 1 and not part.zeros)
    unit = 1 if is_w8a8 else 2 if is_one else whole.group
    group = gcd(unit, *chain(*part.ranges), part.zeros)
    if group < unit and (is_one or group % GROUP_STEP):
        return cut(plain(whole.factors("float32")), part)

    def of_columns(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not whole.codes:
            if is_one:
                return tensor.clone()
            tensor = tensor.repeat_interleave(unit // group, -1)
        count = tensor.shape[-1]
        ranges = tuple((start * count // columns, end * count // columns) for start, end in part.ranges)
        return picked(tensor, RankSlice(ranges, part.zeros * count // columns, part.dim))

    return whole.moved(of_columns)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of 4 or 8 bits, uint8 `[.., 32 n / bits]`, from int32 `[.., n]`, lowest bits first."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack([found & 15, found >> 4], dim=-1).flatten(-2)


def picked(tensor: torch.Tensor, part: RankSlice) -> torch.Tensor:
    """Return a part of a tensor, in memory of its own. Numbers in float16 become float32."""
    rows = sum(end - start + part.zeros for start, end in part.ranges)
    dtype = torch.float32 if tensor.dtype == torch.float16 else tensor.dtype
    out = torch.empty(*tensor.shape[: part.dim], rows, *tensor.shape[part.dim + 1 :], dtype=dtype)
    at = 0
    for start, end in part.ranges:
        out.narrow(part.dim, at, end - start).copy_(tensor.narrow(part.dim, start, end - start))
        at += end - start + part.zeros
        out.narrow(part.dim, at - part.zeros, part.zeros).zero_()
    return out


def _whole(encoding: Matrix, shape: tuple[int, ...], scheme: Scheme | None, stored: Open) -> Stored:
    """Return all of a matrix, whose codes may be the file's."""
    if isinstance(encoding, Plain):
        floats = stored(encoding.name)
        return plain(floats.mT if encoding.transposed else floats)
    assert scheme is not None
    words = stored(encoding.codes)
    bits = bits_of(encoding, shape, scheme, tuple(words.shape))
    scales = _scales(encoding, len(shape), stored)
    zeros = None if encoding.zeros is None else _zeros(encoding, bits, shape, scheme, stored)
    offsets = None if zeros is None or not zeros.any() else -zeros * scales
    steps = steps_of(shape, tuple(scales.shape), scheme.blocks)
    assert steps is not None
    groups = torch.arange(shape[-1]) // steps[-1]
    order = groups if encoding.group_of is None else stored(encoding.group_of)
    is_even = shape[-1] % steps[-1] == 0 and (order.equal(groups.to(order.dtype)) or bool((order < 0).any()))
    if not is_even and order.max() >= scales.shape[-1]:
        raise ModelError(
            f"tensor {encoding.group_of} names group {int(order.max())} of {scales.shape[-1]}: "
            "download the model again"
        )

    def spread(cells: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(shape[:-1]):
            cells = cells.repeat_interleave(steps[dim], dim).narrow(dim, 0, size)
        return cells if is_even else cells.index_select(-1, order)

    found = Stored(*_codes(encoding, words, bits, shape[-1]), spread(scales))
    found = replace(found, offsets=None if offsets is None else spread(offsets))
    if (found.kind, found.group, offsets, scheme.inputs) == ("int8", found.columns, None, "int8"):
        found = replace(found, kind="w8a8")
    return found if is_even and words.dtype != torch.float8_e5m2 else found.widened


def _codes(encoding: Coded, words: torch.Tensor, bits: int, columns: int) -> tuple[torch.Tensor, Kind]:
    """Return the codes `[.., N, K]` and their kind."""
    form = encoding.format
    match form.layout:
        case "blocks":
            return words.flatten(-2), "fp4"
        case "gptq":
            words = words.T
        case "awq":
            nibbles = _in_order(unpacked(words, 4)).T
            return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, "int4"
        case "rows":
            if form.dtypes == EIGHT_BITS:
                return words, "int8" if words.dtype == torch.int8 else "fp8"
            if form.dtypes == BYTES:
                return words, "fp4"
    found = words.contiguous().view(torch.uint8)[..., : columns * bits // 8]
    return (found, "int4") if bits == 4 else ((found ^ 128).view(torch.int8), "int8")


def _scales(encoding: Coded, dims: int, stored: Open) -> torch.Tensor:
    """Return the scales, float32, with `dims` dimensions."""
    found = stored(encoding.scales)
    found = (found.view(torch.float8_e8m0fnu) if found.dtype == torch.uint8 else found).float()
    if encoding.factor is not None:
        factor = stored(encoding.factor)
        found = found / factor if encoding.format.divides else found * factor
    found = found.view(grid_of(tuple(found.shape), dims))
    return found.T if encoding.format.layout in {"gptq", "awq"} else found


def _zeros(encoding: Coded, bits: int, shape: tuple[int, ...], scheme: Scheme, stored: Open) -> torch.Tensor:
    """Return the signed numbers that stand for zero, float32, of the shape of the scales."""
    assert encoding.zeros is not None
    found = stored(encoding.zeros)
    if found.dtype == torch.int8:
        return found.float().view(grid_of(tuple(found.shape), len(shape)))
    by_row = encoding.format.layout == "rows"
    codes_GN = unpacked(found.T if by_row else found, bits)
    if encoding.format.layout == "awq":
        codes_GN = _in_order(codes_GN)
    half = 1 << bits - 1
    return ((codes_GN[:, : shape[-2]].T.float() + scheme.shift) % (2 * half)) - half


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    by_word = codes.view(*codes.shape[:-1], -1, 8)
    return by_word[..., AWQ_ORDER].view(codes.shape)
