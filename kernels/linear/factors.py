# pyrefly: ignore-errors[bad-argument-type, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""Codes of weights in the order of CUDA's kernels, and their factors, which are computed in registers: memory
is read for codes and scales alone.

A row is cut into blocks of 128 columns, the last filled up. A byte of 4 bits kinds holds two columns that are
64 apart: a step of 64 columns takes the lower halves of 64 bytes, and the next one the upper halves.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.reference import COLUMNS_MAX
from tidemill.kernels.linear.stored import FOUR_BITS, Stored

DEPTH = 64  # columns of a step
DEPTH_FLOAT32 = 16
BLOCK = 2 * DEPTH
# Tokens of a tile: rows of weights, warps. Warps share no rows: a tile decodes none of them twice.
TILES = {16: (64, 4), 32: (64, 4), 64: (64, 4), 128: (128, 8)}
SHARED_BYTES = 80 << 10  # of the steps that are under way: small devices have 99 KiB


def takes(part: Stored) -> bool:
    """Return whether kernels compute with these codes. A step must be in one group or have whole groups."""
    if part.scales is None:
        return False
    return part.group == part.columns or part.group % DEPTH == 0 or DEPTH % part.group == 0


def pack_codes(part: Stored, bias_N: Tensor | None) -> Packed:
    """Return codes in the order of the kernels, `[.., N, bytes]` of uint8, and scales `[.., G, N]`."""
    assert part.kind not in {"float32", "bfloat16"}
    assert part.scales is not None
    assert part.kind != "w8a8" or part.columns <= COLUMNS_MAX
    codes = part.codes.view(torch.uint8)
    if part.kind in FOUR_BITS:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    codes = pad(codes, (0, -part.columns % BLOCK))
    if part.kind in FOUR_BITS:
        low, high = codes.unflatten(-1, (-1, 2, DEPTH)).unbind(-2)
        codes = (low | high << 4).flatten(-2)
    return Packed(
        codes.contiguous(),
        None if bias_N is None else bias_N.bfloat16().contiguous(),
        codes.shape[-2],
        part.columns,
        kind=part.kind,
        scales=narrowed(part.scales),
        offsets=None if part.offsets is None else narrowed(part.offsets),
    )


def narrowed(scales: Tensor) -> Tensor:
    """Return `[.., G, N]`, in 16 bits where these hold all values."""
    turned = scales.transpose(-1, -2).contiguous()
    fits = (half for dtype in (torch.bfloat16, torch.float16) if (half := turned.to(dtype)).equal(turned))
    return next(fits, turned)


def constants(weight: Packed) -> dict[str, Any]:
    """Return the constants of `factors` that depend on the weights: of floats KIND is None."""
    groups = 1 if weight.scales is None else weight.scales.shape[-2]
    return {
        "KIND": None if weight.scales is None else weight.kind,
        "HALVES": 2 if weight.kind in FOUR_BITS else 1,
        "GROUPS": groups,
        "GROUP": weight.in_features // groups,
        "ROW": weight.data.shape[-1],
    }


def tile_of_codes(weight: Packed, tokens: int, products: int = 1) -> dict[str, int]:
    """Return the sizes of a tile of `tokens`, and how it is launched; `products` share its tokens."""
    rows, warps = TILES[tokens]
    halves, size = 2 if weight.kind in FOUR_BITS else 1, weight.data.element_size()
    depth = DEPTH_FLOAT32 if size == 4 else DEPTH
    stages = SHARED_BYTES // (depth * (products * rows * size + max(2, size) * halves * tokens))
    return {
        "M": tokens,
        "N": rows,
        "D": depth,
        "num_warps": warps,
        "num_stages": max(2, min(4, stages)),
        "maxnreg": 255,
    }


def dtype_of(weight: Packed) -> torch.dtype:
    """Return the type of products."""
    return weight.data.dtype if weight.scales is None else torch.bfloat16


@triton.jit
def numbers(codes, half, KIND: tl.constexpr):
    """Return the numbers of codes, float32; of 4 bits those in the lower halves of bytes, or in the upper."""
    if KIND == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    bits = codes.to(tl.uint32)
    if KIND == "fp8":  # A float32 of the same bits, denormal ones too, is 2^120 times smaller.
        same = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return same.to(tl.float32, bitcast=True) * 1.329227995784916e36
    bits = (bits >> (4 * half)) & 15
    if KIND == "fp4":
        same = ((bits & 8) << 28) | ((bits & 7) << 22)
        return same.to(tl.float32, bitcast=True) * 8.507059173023462e37
    # The last bits of 2^23: a conversion takes twice as long as the subtraction.
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388616.0 if KIND == "int4" else 8388608.0)


@triton.jit
def of_columns(
    values,  # [GROUPS, ROWS]
    row_N, in_N, depth,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return the values of the groups of columns [depth, depth + D), float32, for `[N, D]`. Columns beyond
    the last group have its value."""
    if GROUP < D and GROUPS > 1:
        group_J = tl.minimum(depth // GROUP + tl.arange(0, D // GROUP), GROUPS - 1)
        value_NJ = tl.load(values + group_J[None, :] * ROWS + row_N[:, None], mask=in_N[:, None], other=0.0)
        value_NJG = tl.broadcast_to(value_NJ.to(tl.float32)[:, :, None], (N, D // GROUP, GROUP))
        return tl.reshape(value_NJG, (N, D))
    else:  # noqa: RET505 - else Triton compiles both
        group = tl.minimum(depth // GROUP, GROUPS - 1)
        return tl.load(values + group * ROWS + row_N, mask=in_N, other=0.0).to(tl.float32)[:, None]


@triton.jit
def factors(
    codes_ND, half,
    scales, offsets,  # [GROUPS, ROWS], or None
    row_N, in_N, depth,
    ROWS: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return the factors of rows and columns [depth, depth + D), bfloat16; floats as they are, and of `w8a8`
    int8."""
    if KIND is None:
        return codes_ND
    elif KIND == "w8a8":  # noqa: RET505
        return codes_ND.to(tl.int8, bitcast=True)
    else:
        scale_ND = of_columns(scales, row_N, in_N, depth, ROWS, GROUPS, GROUP, N, D)
        value_ND = numbers(codes_ND, half, KIND) * scale_ND
        if offsets is not None:
            value_ND += of_columns(offsets, row_N, in_N, depth, ROWS, GROUPS, GROUP, N, D)
        return value_ND.to(tl.bfloat16)


@triton.jit
def zeros(KIND: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Return sums `[N, M]` of nothing, int32 of `w8a8`, else float32."""
    return tl.zeros([N, M], tl.int32 if KIND == "w8a8" else tl.float32)


@triton.jit
def scaled(
    sum_NM,
    x_scales, at_M, in_M,  # of rows of x
    scales, row_N, in_N,  # [ROWS]
    KIND: tl.constexpr,
):  # fmt: skip
    """Return sums of products, float32: of `w8a8` times both scales."""
    if KIND == "w8a8":
        x_scale_M = tl.load(x_scales + at_M, mask=in_M, other=0.0)
        scale_N = tl.load(scales + row_N, mask=in_N, other=0.0).to(tl.float32)
        return sum_NM.to(tl.float32) * x_scale_M[None, :] * scale_N[:, None]
    else:  # noqa: RET505
        return sum_NM


@triton.jit
def quantise_row(
    x,  # [M, K]
    codes,  # int8 [M, K]
    scales,  # float32 [M]
    row_stride,
    K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Row i of a grid (i,), as `quantised` of reference.py."""
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.arange(0, BLOCK)
    size_B = tl.zeros([BLOCK], tl.int32)  # as integers NaN is larger than infinity
    for first in range(0, K, BLOCK):
        x_B = tl.load(x + row * row_stride + first + at_B, mask=first + at_B < K, other=0.0).to(tl.float32)
        size_B = tl.maximum(size_B, x_B.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    size = tl.max(size_B, 0)
    largest, is_tiny = size.to(tl.float32, bitcast=True), size < 0x0D800000  # 2^-100
    inverse = tl.where(is_tiny, 0.0, tl.div_rn(127.0, tl.where(is_tiny, 1.0, largest)))
    scale = tl.where(is_tiny, 0.0, tl.div_rn(largest, 127.0))
    tl.store(scales + row, tl.where(size < 0x7F800000, scale, float("nan")))
    for first in range(0, K, BLOCK):
        x_B = tl.load(x + row * row_stride + first + at_B, mask=first + at_B < K, other=0.0).to(tl.float32)
        # The last bits of 1.5 * 2^23 and an integer are those of the integer.
        code_B = (x_B * inverse + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        tl.store(codes + row * K + first + at_B, code_B, mask=first + at_B < K)


def taken(x: Tensor, weight: Packed) -> tuple[Tensor, Tensor | None]:
    """Return the rows of x `[.., K]` as products with weights take them, and their scales `[..]` where they
    are codes."""
    if weight.kind != "w8a8":
        return x.to(dtype_of(weight)), None
    x_MK = x.reshape(-1, x.shape[-1])
    rows, depth = x_MK.shape
    codes, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)
    block = min(4096, triton.next_power_of_2(depth))
    # A product and a sum that are one operation would round ties of the product otherwise.
    quantise_row[(rows,)](x_MK, codes, scales, x_MK.stride(0), K=depth, BLOCK=block, enable_fp_fusion=False)
    return codes, scales
