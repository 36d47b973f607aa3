# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""Codes of FP8 in Triton, by integers: GPUs before 8.9 have no instructions for them. fp8.py is the
definition."""

import triton
import triton.language as tl


@triton.jit
def decode(codes):
    """Return the numbers of codes times 2^-8, bfloat16: a code is a float16 with one bit of exponent less."""
    code = codes.to(tl.int16)
    half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def power(scales):
    """Return 2^8 times scales, float32."""
    return ((scales.to(tl.int32) + 8) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(x):
    """Return the scale, int32, of float32 numbers."""
    sizes = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)  # NaN as infinity
    highest = tl.max(tl.ravel(sizes), 0)
    return tl.minimum(tl.maximum(((highest + 0x1FFFFF) >> 23) - 8, 16), 246)


@triton.jit
def encode(x, scale):
    """Return the codes of float32 numbers, uint8."""
    bits = (x * ((254 - scale) << 23).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    units = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, units, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def put_codes(x, codes, scale, mask, FIXED: tl.constexpr) -> None:
    """Store float32 numbers at `codes`, and their scale at `scale` unless it is fixed."""
    if FIXED:
        byte = tl.load(scale).to(tl.int32)
    else:
        byte = scale_of(x)
        tl.store(scale, byte.to(tl.uint8))
    tl.store(codes, encode(x, byte), mask=mask)
