"""A layer's pages as the C++ operators take them."""

import torch

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers by which the C++ operators know the types of elements."""


def page_arguments(cache: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """Address, strides in bytes of page, head, K|V and token, and the kind of elements.

    cache   [pages, kv_heads, 2, P, D], the elements of D side by side; with 1 in place of 2 the values are
            the keys, and the stride from one to the other is 0
    """
    page, head, kv, token, element = cache.stride()
    assert element == 1
    size = cache.element_size()
    kv = kv if cache.shape[2] > 1 else 0
    return cache.data_ptr(), page * size, head * size, kv * size, token * size, KINDS[cache.dtype]
