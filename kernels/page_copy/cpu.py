"""`page_copy` on CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill.kernels.page_copy.planes import Direction, PageCopy, Plane, numbers, sizes
from tidemill.kernels.shared.build import Library


def bind(library: Library) -> PageCopy:
    call = library.function("page_copy")

    def page_copy(planes: Sequence[Plane], page_N: Tensor, slot_T: Tensor, direction: Direction) -> None:
        if not planes or not len(slot_T):
            return
        heads, page_tokens, block_tokens = sizes(planes, page_N, slot_T)
        num_pages = min(len(plane.pages) for plane in planes)
        num_slots = min(len(plane.cache) for plane in planes) * block_tokens
        table = torch.tensor(numbers(planes), dtype=torch.int64)
        call(
            table.data_ptr(), len(planes), heads, page_tokens, block_tokens,
            page_N.data_ptr(), num_pages, slot_T.data_ptr(), num_slots, len(slot_T),
            int(direction == "export"),
        )  # fmt: skip

    return page_copy
