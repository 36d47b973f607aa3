"""Compute the values of stored tensors, quantised or not. A part of a tensor has exactly the values of the
whole.

A quantised value is one product in float32, rounded to bfloat16, computed in pieces that fit a core's
cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias, assert_never

import numpy as np
import torch

from tidemill.workers.models.loading.encodings import (
    MXFP4_GROUP,
    Encoding,
    Mxfp4,
    PackedInts,
    Plain,
    Scaled,
    Scheme,
    Stacked,
    grid_of,
    steps_of,
)
from tidemill.workers.models.loading.sharding import RankSlice

PIECE = 1 << 18
"""The number of elements in a piece."""

Region: TypeAlias = tuple[tuple[int, int], ...]
"""A half-open range of each dimension."""

Values: TypeAlias = Callable[[Region], torch.Tensor]
"""Returns the values of a region, in a dtype that is converted when they are copied to their destination."""

Open: TypeAlias = Callable[[str], torch.Tensor]
"""Returns a stored tensor by name."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def read_part(
    encoding: Encoding, shape: tuple[int, ...], scheme: Scheme | None, stored: Open, part: RankSlice
) -> torch.Tensor:
    """Return the part of a tensor of `shape`, in memory of its own: float32 if it is stored as float32 or
    float16, else bfloat16."""
    values, dtype = _values(encoding, shape, scheme, stored), _dtype(encoding, stored)
    if isinstance(encoding, Mxfp4):
        swapped = replace(part, dim=(0, 2, 1)[part.dim])
        return _filled(values, (shape[0], shape[2], shape[1]), swapped, dtype).mT
    return _filled(values, shape, part, dtype)


def _filled(values: Values, shape: tuple[int, ...], part: RankSlice, dtype: torch.dtype) -> torch.Tensor:
    rows = sum(end - start + part.zeros for start, end in part.ranges)
    out = torch.empty(*shape[: part.dim], rows, *shape[part.dim + 1 :], dtype=dtype)
    at = 0
    for start, end in part.ranges:
        whole = tuple((0, size) for size in shape)
        for region in _pieces((*whole[: part.dim], (start, end), *whole[part.dim + 1 :])):
            to = list(_slices(region))
            to[part.dim] = slice(*(index - start + at for index in region[part.dim]))
            out[tuple(to)] = values(region)
        at += end - start + part.zeros
        out.narrow(part.dim, at - part.zeros, part.zeros).zero_()
    return out


def _pieces(region: Region) -> Iterator[Region]:
    """Yield the region, cut at its first dimensions into small pieces."""
    sizes = [end - start for start, end in region]
    if prod(sizes) <= PIECE:
        if all(sizes):
            yield region
        return
    dim = next(index for index, size in enumerate(sizes) if size > 1)
    start, end = region[dim]
    middle = (start + end) // 2
    for half in ((start, middle), (middle, end)):
        yield from _pieces((*region[:dim], half, *region[dim + 1 :]))


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in region)


def _dtype(encoding: Encoding, stored: Open) -> torch.dtype:
    match encoding:
        case Plain(name):
            return torch.bfloat16 if stored(name).dtype == torch.bfloat16 else torch.float32
        case Scaled() | PackedInts() | Mxfp4():
            return torch.bfloat16
        case Stacked(experts):
            kinds = {_dtype(matrix, stored) for stack in experts for matrix in stack}
            return torch.float32 if torch.float32 in kinds else torch.bfloat16
        case _:
            assert_never(encoding)


def _values(encoding: Encoding, shape: tuple[int, ...], scheme: Scheme | None, stored: Open) -> Values:
    match encoding:
        case Plain(name):
            tensor = stored(name)
            return lambda region: tensor[_slices(region)]
        case Scaled():
            return _scaled(encoding, shape, scheme, stored)
        case PackedInts():
            assert scheme is not None
            return _packed(encoding, shape, scheme, stored)
        case Mxfp4(blocks, scales):
            return _mxfp4(stored(blocks), stored(scales))
        case Stacked(experts):
            rows = shape[1] // len(experts[0])
            matrices = [
                [_values(matrix, (rows, shape[2]), scheme, stored) for matrix in stack] for stack in experts
            ]
            return lambda region: _stacked(matrices, rows, region)
        case _:
            assert_never(encoding)


def _stacked(matrices: list[list[Values]], rows: int, region: Region) -> torch.Tensor:
    (first, last), (start, end), columns = region
    found: list[torch.Tensor] = []
    for stack in matrices[first:last]:
        for index, values in enumerate(stack):
            own = max(start - index * rows, 0), min(end - index * rows, rows)
            if own[0] < own[1]:
                found.append(values((own, columns)))
    return torch.cat(found).view(last - first, end - start, columns[1] - columns[0])


def _scaled(encoding: Scaled, shape: tuple[int, ...], scheme: Scheme | None, stored: Open) -> Values:
    weight = stored(encoding.weight)
    table = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float().numpy()
    codes = weight.view(torch.uint8).numpy()
    zeros = None if encoding.zero_point is None else stored(encoding.zero_point)
    scale = _Grid(stored(encoding.scale), shape, scheme)
    offset = None if zeros is None else _Grid(zeros, shape, scheme)

    def values(region: Region) -> torch.Tensor:
        found = _looked_up(table, codes[_slices(region)])
        if offset is not None:
            found -= offset.of(region)
        return found.mul_(scale.of(region))

    return values


def _packed(encoding: PackedInts, shape: tuple[int, ...], scheme: Scheme, stored: Open) -> Values:
    packed, offset = stored(encoding.packed), None
    group_of = None if encoding.group_of is None else stored(encoding.group_of)
    scale = _Grid(stored(encoding.scale), shape, scheme, group_of)
    if encoding.zero_point is not None:  # packed along the rows, unlike the weights
        zeros_GR = unpacked(stored(encoding.zero_point).T.contiguous(), scheme.bits)[:, : shape[0]]
        offset = _Grid(zeros_GR.T, shape, scheme, group_of)

    def values(region: Region) -> torch.Tensor:
        *rows, columns = _slices(region)
        found = unpacked(packed[tuple(rows)], scheme.bits)[..., columns].float()
        if offset is not None:
            found -= offset.of(region)
        return found.mul_(scale.of(region))

    return values


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return signed integers of 4 or 8 bits, int8 `[.., 32 n / bits]`, from int32 `[.., n]`, lowest bits
    first."""
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 4:
        bytes_ = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)
    return (bytes_.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def _mxfp4(blocks_ENGB: torch.Tensor, scales_ENG: torch.Tensor) -> Values:
    """Return the values of `[E, N, K]`: a byte is two values, the first in its lower half, each times a power
    of two."""
    values_16 = torch.tensor(FP4)
    codes = torch.arange(256)
    pairs = torch.stack([values_16[codes & 15], values_16[codes >> 4]], dim=1).to(torch.bfloat16)
    table = pairs.view(torch.int32)[:, 0].numpy()
    codes_ENGB = blocks_ENGB.numpy()

    def values(region: Region) -> torch.Tensor:
        experts, rows, (start, end) = region
        first, last = start // MXFP4_GROUP, -(-end // MXFP4_GROUP)
        groups = (*_slices((experts, rows)), slice(first, last))
        found = _looked_up(table, codes_ENGB[groups]).view(torch.bfloat16)
        powers = scales_ENG[groups].view(torch.float8_e8m0fnu).to(torch.bfloat16)
        scaled = (found * powers[..., None]).flatten(-2)
        return scaled[..., start - first * MXFP4_GROUP : end - first * MXFP4_GROUP]

    return values


def _looked_up(table: "np.ndarray[Any, Any]", codes: "np.ndarray[Any, Any]") -> torch.Tensor:
    """Look up values: the fastest way on a CPU, because torch converts from 8-bit floats one by one."""
    return torch.from_numpy(np.take(table, codes, mode="clip"))  # pyright: ignore[reportUnknownMemberType]


class _Grid:
    """The scales or zero points, one for each block of a tensor of `shape`."""

    def __init__(
        self,
        cells: torch.Tensor,
        shape: tuple[int, ...],
        scheme: Scheme | None,
        group_of: torch.Tensor | None = None,
    ) -> None:
        self._cells = cells.float().view(grid_of(tuple(cells.shape), len(shape)))
        self._steps = steps_of(shape, tuple(self._cells.shape), None if scheme is None else scheme.block)
        self._group_of = None if group_of is None or (group_of < 0).any() else group_of

    def of(self, region: Region) -> torch.Tensor:
        """Return one for each element of the region, in the dimensions in which they differ."""
        found, inner = self._cells, self._group_of
        steps = [step if cells > 1 else 0 for step, cells in zip(self._steps, found.shape, strict=True)]
        if inner is not None:
            steps[-1] = 0
        for dim, ((start, end), step) in enumerate(zip(region, steps, strict=True)):
            if step:
                found = found.narrow(dim, start // step, -(-end // step) - start // step)
        if inner is not None:
            found = found.index_select(-1, inner[slice(*region[-1])])
        for dim, ((start, end), step) in reversed(list(enumerate(zip(region, steps, strict=True)))):
            if step > 1:
                found = found.index_select(dim, torch.arange(start, end) // step - start // step)
        return found
