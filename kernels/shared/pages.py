"""A layer's pages as the C++ operators take them."""

import torch

DTYPES = (torch.float32, torch.bfloat16)


def page_arguments(cache: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """Address, strides in bytes of page, head, K|V and token, and whether elements are bfloat16.

    cache   [pages, kv_heads, 2, P, D], the elements of D side by side; with 1 in place of 2 the values are
            the keys, and the stride from one to the other is 0
    """
    assert cache.dtype in DTYPES
    page, head, kv, token, element = cache.stride()
    assert element == 1
    size = cache.element_size()
    kv = kv if cache.shape[2] > 1 else 0
    return cache.data_ptr(), page * size, head * size, kv * size, token * size, int(size == 2)
