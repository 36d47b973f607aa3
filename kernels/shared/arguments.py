"""Tensors as the C++ operators take them: each is checked where its address leaves Python."""

import torch
from torch import Tensor

from tidemill.kernels.shared.fp8 import Fp8, Pages
from tidemill.kernels.shared.rows import Rows

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
"""The numbers by which the C++ operators know the types of elements."""


def address(values: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of values of this shape, which lie side by side."""
    assert values.shape == shape
    assert values.dtype == dtype
    assert values.is_contiguous()
    return values.data_ptr()


def address_or_null(values: Tensor | None, *shape: int) -> int | None:
    return None if values is None else address(values, *shape)


def page_arguments(cache: Pages, rows: Rows, tokens: int) -> tuple[int | None, ...]:
    """Return the numbers of a layer's pages and of their scales, and of the rows of a step that has `tokens`.

    cache   [pages, kv_heads, 2, P, D], the elements of D side by side; with 1 in place of 2 the values are
            the keys, and the stride from one to the other is 0
    """
    cache, scales = cache if isinstance(cache, Fp8) else (cache, None)
    pages, _, parts, page_tokens, dim = cache.shape
    page, head, kv, token, element = cache.stride()
    assert element == 1 or dim == 1
    size, table_BN = cache.element_size(), rows.pages_BN
    count, width = table_BN.shape
    assert table_BN.dtype == torch.int32
    assert width <= 1 or table_BN.stride(1) == 1
    assert (scales is None) == (cache.dtype != torch.uint8)
    assert scales is None or scales.shape == cache.shape[:4]
    lie = (None, 0, 0, 0, 0) if scales is None else (scales.data_ptr(), *scales.stride())
    return (
        cache.data_ptr(), pages, page * size, head * size, kv * size if parts > 1 else 0, token * size,
        KINDS[cache.dtype], *lie, page_tokens, table_BN.data_ptr(), table_BN.stride(0), width,
        address(rows.cu_B1, count + 1, dtype=torch.int32), address(rows.lens_B, count, dtype=torch.int32),
        count, tokens,
    )  # fmt: skip


def state_arguments(states: Tensor, rows: Rows, tokens: int) -> tuple[int, ...]:
    """Return the numbers of a layer's states `[states, groups, ..]`, and of the rows of a step that has
    `tokens`."""
    (count, kept), strides = rows.writes_BK.shape, states.stride()
    return (
        states.data_ptr(), states.shape[0], strides[0], strides[1],
        address(rows.cu_B1, count + 1, dtype=torch.int32), address(rows.read_B, count, dtype=torch.int32),
        address(rows.writes_BK, count, kept, dtype=torch.int32), count, kept, tokens,
    )  # fmt: skip
