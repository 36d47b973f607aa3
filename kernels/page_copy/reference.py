"""The definition of `page_copy`: tokens of page-first pages to and from a layer-first cache."""

from collections.abc import Sequence

import torch

from tidemill.kernels.page_copy.planes import Direction, Plane


def page_copy(
    planes: Sequence[Plane], page_N: torch.Tensor, slot_T: torch.Tensor, direction: Direction
) -> None:
    """Copies token t of a run of T tokens, for all heads of all planes, bit for bit; nothing else is written.

    planes  one layer's or all layers': any number, which have heads, P and B in common
    page_N  int32: token t is token t % P of page page_N[t // P]; N = ceil(T / P), no page twice
    slot_T  int64: and token slot_T[t] % B of block slot_T[t] // B of the cache, so that B may be anything; no
            slot twice

    Pages and slots beyond the views are the caller's mistake.
    """
    for plane in planes:
        token_T = torch.arange(len(slot_T), device=slot_T.device)
        page_tokens, block_tokens = plane.pages.shape[2], plane.cache.shape[2]
        in_pages = (page_N.long()[token_T // page_tokens], slice(None), token_T % page_tokens)
        in_cache = (slot_T // block_tokens, slice(None), slot_T % block_tokens)
        match direction:
            case "export":
                plane.cache[in_cache] = plane.pages[in_pages].view(plane.cache.dtype)
            case "import":
                plane.pages[in_pages] = plane.cache[in_cache].view(plane.pages.dtype)
