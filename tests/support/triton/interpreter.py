"""Makes Triton's interpreter compute bfloat16 as a device does.

It holds bfloat16 as the bits of a uint16 (3.6 to 3.9): its arithmetic and its dot product work on those bits
as on integers, and float32 is cut rather than rounded.
"""

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), near)


def values(handle: Any) -> Any:  # noqa: ANN401
    return widened(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data


def compute_bfloat16() -> None:
    """Compute in bfloat16 from now on, in this process."""
    builder: Any = InterpreterBuilder
    cast_impl, fp_to_fp, binary_op = builder.cast_impl, builder.create_fp_to_fp, builder.binary_op

    def cast(self: Any, source: Any, target: Any) -> Any:  # noqa: ANN401
        of, to = source.dtype.scalar, target.scalar
        if of == to or tl.bfloat16 not in {of, to}:
            return cast_impl(self, source, target)
        if of == tl.bfloat16:
            wide = TensorHandle(widened(source.data), tl.float32)
            return wide if to == tl.float32 else cast_impl(self, wide, target)
        wide = source if of == tl.float32 else cast_impl(self, source, tl.float32)
        return TensorHandle(rounded(wide.data), to)

    def float_to_float(self: Any, source: Any, target: Any, rounding: Any) -> Any:  # noqa: ANN401
        if tl.bfloat16 in {source.dtype.scalar, target.scalar}:
            return cast(self, source, target)
        return fp_to_fp(self, source, target, rounding)

    def dot(_: Any, a: Any, b: Any, c: Any, *__: Any) -> Any:  # noqa: ANN401
        return TensorHandle(np.matmul(values(a), values(b), dtype=c.data.dtype) + c.data, c.dtype.scalar)

    def binary(self: Any, a: Any, b: Any, operation: Any) -> Any:  # noqa: ANN401
        if a.dtype.scalar != tl.bfloat16:
            return binary_op(self, a, b, operation)
        result = operation(values(a), values(b))
        return TensorHandle(result if result.dtype == bool else rounded(result), a.dtype.scalar)

    builder.cast_impl = cast
    builder.create_fp_to_fp = float_to_float
    builder.create_dot = dot
    builder.binary_op = binary
