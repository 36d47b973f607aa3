# pyright: basic
# torch's typing makes strict mode noise here.
"""Memory for `page_copy`: caches as other engines lay them out, our pages, and a run of tokens in both."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tidemill.kernels.page_copy.planes import Plane
from tidemill.kvstore.layout import Attention, layout_of
from tidemill.workers.models.inputs import caches_of

Made = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The tensors of one layer, and its planes [blocks, heads, B, D]: keys and values, or latents."""


def _vllm(blocks: int, heads: int, block_tokens: int, dim: int, dtype: torch.dtype) -> Made:
    kv = torch.empty(2, blocks, block_tokens, heads, dim, dtype=dtype)
    return [kv], [kv[0].transpose(1, 2), kv[1].transpose(1, 2)]


def _flashinfer_nhd(blocks: int, heads: int, block_tokens: int, dim: int, dtype: torch.dtype) -> Made:
    kv = torch.empty(blocks, 2, block_tokens, heads, dim, dtype=dtype)
    return [kv], [kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)]


def _flashinfer_hnd(blocks: int, heads: int, block_tokens: int, dim: int, dtype: torch.dtype) -> Made:
    kv = torch.empty(blocks, 2, heads, block_tokens, dim, dtype=dtype)
    return [kv], [kv[:, 0], kv[:, 1]]


def _sglang(blocks: int, heads: int, block_tokens: int, dim: int, dtype: torch.dtype) -> Made:
    kv = [torch.empty(blocks * block_tokens, heads, dim, dtype=dtype) for _ in range(2)]
    return kv, [part[:, :, None] for part in kv]


def _mla(blocks: int, heads: int, block_tokens: int, dim: int, dtype: torch.dtype) -> Made:
    latents = torch.empty(blocks, block_tokens, heads * dim, dtype=dtype)
    return [latents], [latents[:, None]]


CACHES: dict[str, Callable[[int, int, int, int, torch.dtype], Made]] = {
    "vllm": _vllm,
    "flashinfer-nhd": _flashinfer_nhd,
    "flashinfer-hnd": _flashinfer_hnd,
    "sglang": _sglang,
    "mla": _mla,
}


@dataclass(frozen=True)
class Case:
    """A run of `tokens` between pages of `page_tokens` and blocks of `block_tokens`; a dim for each layer."""

    cache: str = "vllm"
    heads: int = 2
    dims: tuple[int, ...] = (8, 6)
    page_tokens: int = 4
    block_tokens: int = 4
    tokens: int = 11
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class Memory:
    """Both sides of a case, full of random bytes, among them every kind of NaN.

    `slot_T` goes through shuffled blocks, in order inside of a block, as an engine fills them; `shuffled`
    goes through slots in no order at all.
    """

    case: Case
    device: str = "cpu"
    shuffled: bool = False
    parts: list[torch.Tensor] = field(init=False)  # every allocation: pages first
    planes: list[Plane] = field(init=False)

    def __post_init__(self) -> None:
        c, draw = self.case, torch.Generator().manual_seed(self.case.seed)
        num_pages, num_blocks = -(-c.tokens // c.page_tokens), -(-c.tokens // c.block_tokens)
        with torch.device(self.device):
            made = [CACHES[c.cache](num_blocks + 2, c.heads, c.block_tokens, dim, c.dtype) for dim in c.dims]
            pages, sides = _pages_of(c, num_pages + 2)
        self.parts = [pages, *(part for parts, _ in made for part in parts)]
        for part in self.parts:
            size = bytes_of(part).numel()
            bytes_of(part).copy_(torch.randint(256, (size,), dtype=torch.uint8, generator=draw))
        views = [view for _, views in made for view in views]
        self.planes = [Plane(side, view) for side, view in zip(sides, views, strict=True)]
        page_N = torch.randperm(num_pages + 2, generator=draw)[:num_pages]
        block_N = torch.randperm(num_blocks + 2, generator=draw)
        token_T = torch.arange(c.tokens)
        if self.shuffled:
            token_T = torch.randperm(num_blocks * c.block_tokens, generator=draw)[: c.tokens]
        slot_T = block_N[token_T // c.block_tokens] * c.block_tokens + token_T % c.block_tokens
        self.page_N, self.slot_T = page_N.to(self.device, torch.int32), slot_T.to(self.device)

    def is_like(self, other: "Memory") -> bool:
        """Bit for bit, inside and outside of what was copied."""
        pairs = zip(self.parts, other.parts, strict=True)
        return all(torch.equal(bytes_of(part).cpu(), bytes_of(peer).cpu()) for part, peer in pairs)


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1).view(torch.uint8)


def _pages_of(c: Case, num_pages: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Page-first memory, and its planes [pages, heads, P, D]: as many as those of the cache."""
    if c.cache == "mla":
        widths = [c.heads * dim for dim in c.dims]
        pages = torch.empty(num_pages, c.page_tokens * sum(widths), dtype=c.dtype)
        layers = pages.split([c.page_tokens * width for width in widths], dim=1)
        shapes = [(num_pages, 1, c.page_tokens, width) for width in widths]
        return pages, [layer.view(shape) for layer, shape in zip(layers, shapes, strict=True)]
    if c.dtype == torch.uint8:  # a page of bytes, as of another engine's fp8
        size = 2 * c.heads * c.page_tokens * sum(c.dims)
        pages = torch.empty(num_pages, c.heads, size // c.heads, dtype=c.dtype)
        layers = pages.split([2 * c.page_tokens * dim for dim in c.dims], dim=2)
        views = [
            layer.view(num_pages, c.heads, 2, c.page_tokens, dim)
            for layer, dim in zip(layers, c.dims, strict=True)
        ]
        return pages, [view[:, :, kv] for view in views for kv in range(2)]
    specs = [Attention(kv_heads=c.heads, head_dim=dim) for dim in c.dims]
    kv_dtype = "float32" if c.dtype == torch.float32 else "bfloat16"
    layout = layout_of(specs, c.page_tokens, kv_dtype, extent_bytes_min=1, granule_bytes=1)
    arena = torch.empty(num_pages * layout.page_bytes, dtype=torch.uint8)
    return arena, [cache[:, :, kv] for cache in caches_of(layout, arena).plain_kv for kv in range(2)]
