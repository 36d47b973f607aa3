"""`attention` and `rope_store` over pages that are NaN where nothing is written: cases, layers, and what each
variant must give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.kernels.cases import (
    LIMITS,
    Step,
    random,
    relative_error,
    same_bits,
    shuffled_pages,
    step,
)
from tidemill.kernels.activation.reference import sigmoid_mul
from tidemill.kernels.dispatch import REFERENCE, Operators
from tidemill.kernels.shared.fp8 import Fp8, Pages, decode, encode, fixed_scales, scale_of

EPSILON = 1e-6
UNWRITTEN = 0x7F  # a code of NaN
SCALINGS = pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per token and head"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of `new` tokens after `before`. `dtype` is that of queries, and of pages if they have none."""

    new: Sequence[int]
    before: Sequence[int]
    page_tokens: int = 64
    heads: tuple[int, int] = (8, 2)
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    latent: bool = False
    window: int | None = None
    sinks: bool = False
    rotary: int = 32
    normed: bool = True

    @property
    def lens(self) -> list[int]:
        return [old + new for old, new in zip(self.before, self.new, strict=True)]

    @property
    def page_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def starts(self) -> list[int]:
        return [sum(self.new[:b]) for b in range(len(self.new) + 1)]

    def arena(self, pages: torch.Tensor, device: str) -> torch.Tensor:
        """Return two layers of NaN, with a page 0 that no row has."""
        shape = self.heads[1], 2, 1 if self.latent else 2, self.page_tokens, self.dim
        return torch.full((1 + int(pages.max()), *shape), torch.nan, dtype=self.page_dtype, device=device)


class Layer:
    """The second of two layers, written as far as the rows of a case go, and queries.

    Pages that have left the window are NaN, and the table has the unused page 0 in their place.
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(sum(case.lens))
        self.case, self.device = case, device
        self.q_THD = random(draw, sum(case.new), case.heads[0], case.dim).to(case.dtype)
        self.sinks_H = 3 * random(draw, case.heads[0]) if case.sinks else None
        self.pages = shuffled_pages(case.lens, case.page_tokens, draw)
        cache = case.arena(self.pages, device)[:, :, 1]
        written = torch.zeros(len(cache), case.page_tokens, dtype=torch.bool)
        for pages_N, before, length in zip(self.pages, case.before, case.lens, strict=True):
            left = 0 if case.window is None else max(0, before - case.window + 1) // case.page_tokens
            pages_N[:left] = 0
            token_N = torch.arange(left * case.page_tokens, length)
            written[pages_N[token_N // case.page_tokens].long(), token_N % case.page_tokens] = True
        kv = random(draw, *cache.shape)
        self.cache: Any = cache.copy_(torch.where(written[:, None, None, :, None], kv, torch.nan))
        self.rows = self.step(case.new, case.before)

    def step(
        self, new: Sequence[int], before: Sequence[int], row: slice | Sequence[int] = slice(None)
    ) -> Step:
        """Return other tokens of these rows, without the pages that none of them sees."""
        pages = self.pages[row].clone()
        for pages_N, old in zip(pages, before, strict=True):
            left = 0 if self.case.window is None else max(0, old - self.case.window + 1)
            pages_N[: left // self.case.page_tokens] = 0
        return step(new, before, pages)

    def run(
        self, ops: Operators, rows: Step | None = None, picked: slice | torch.Tensor = slice(None)
    ) -> torch.Tensor:
        sinks_H = None if self.sinks_H is None else self.sinks_H.to(self.device)
        rows, q_THD = (rows or self.rows).to(self.device), self.q_THD[picked].to(self.device)
        return ops.attention(q_THD, self.cache, rows, self.case.window, sinks_H).cpu()

    def wanted(self, reference: Operators = REFERENCE) -> torch.Tensor:
        cache = self.cache if isinstance(self.cache, Fp8) else self.cache.cpu()
        return reference.attention(self.q_THD.double(), cache, self.rows, self.case.window, self.sinks_H)

    def limit(self, reference: Operators = REFERENCE) -> float:
        dtypes = {self.case.dtype, self.case.page_dtype, getattr(torch, reference.compute_dtype)}
        return max(LIMITS[dtype] for dtype in dtypes)


DECODE: dict[str, Any] = {"new": [1] * 7, "before": [0, 1, 62, 63, 64, 126, 300]}
MIXED: dict[str, Any] = {"new": [1, 5, 64, 1, 127, 2], "before": [300, 0, 64, 0, 1, 62]}
EXTEND: dict[str, Any] = {"new": [1, 2, 63, 64, 65], "before": [0, 63, 64, 1, 0]}
CASES = {
    "decode": Case(**DECODE, heads=(4, 2)),
    "decode float32": Case(new=[1, 1], before=[64, 256], heads=(3, 1), dtype=torch.float32),
    "decode, pages of 16": Case(**DECODE, page_tokens=16, heads=(1, 1), dim=32),
    "decode, odd": Case(new=[1, 1], before=[64, 257], page_tokens=1, heads=(5, 1), dim=63),
    "mixed": Case(**MIXED, heads=(4, 2)),
    "mixed float32": Case(new=[3, 1, 40], before=[20, 7, 9], heads=(3, 1), dim=16, dtype=torch.float32),
    "mixed, float32 queries": Case(
        **MIXED, heads=(1, 1), dim=32, dtype=torch.float32, cache_dtype=torch.bfloat16
    ),
    "mixed, float32 pages": Case(
        new=[1, 20], before=[20, 9], heads=(2, 1), dim=16, cache_dtype=torch.float32
    ),
    "extend, pages of 16": Case(**EXTEND, page_tokens=16, heads=(3, 1), dim=32),
    "extend, pages of 128": Case(**EXTEND, page_tokens=128, heads=(2, 1), dim=256),
    "extend, odd": Case(**EXTEND, page_tokens=1, heads=(5, 1), dim=65),
    "extend, dim 1": Case(new=[30, 1], before=[3, 7], page_tokens=7, heads=(1, 1), dim=1),
    "latents, decode": Case(**DECODE, heads=(20, 1), dim=40, latent=True),
    "latents, mixed": Case(**MIXED, heads=(3, 1), dim=48, latent=True),
    "latents, wide": Case(new=[1, 3, 30], before=[70, 0, 5], heads=(72, 1), dim=576, latent=True),
    "latents float32": Case(
        new=[1, 20], before=[70, 5], heads=(2, 1), dim=68, page_tokens=16, dtype=torch.float32, latent=True
    ),
    "latents of a power of two": Case(**EXTEND, heads=(2, 1), dim=64, latent=True),
    "latents, dim 8": Case(**EXTEND, page_tokens=16, heads=(2, 1), dim=8, latent=True),
    "decode, sinks": Case(**DECODE, heads=(4, 2), dim=32, sinks=True),
    "mixed, sinks": Case(**MIXED, heads=(4, 2), dim=32, sinks=True),
    "mixed float32, window and sinks": Case(
        new=[1, 30], before=[70, 40], heads=(3, 1), dim=16, dtype=torch.float32, window=33, sinks=True
    ),
    "extend, odd, window and sinks": Case(
        **EXTEND, page_tokens=1, heads=(5, 1), dim=65, window=17, sinks=True
    ),
    **{
        f"mixed, window of {window}": Case(**MIXED, heads=(2, 1), dim=32, window=window)
        for window in (1, 63, 64, 65, 128, 500)
    },
    **{
        f"mixed, pages of 16, window of {window}": Case(
            new=[1, 130, 1], before=[300, 200, 600], page_tokens=16, heads=(2, 1), dim=32, window=window
        )
        for window in (65, 257)
    },
}


def check(case: Case, ops: Operators, device: str = "cpu", reference: Operators = REFERENCE) -> None:
    layer = Layer(case, device)
    assert relative_error(layer.run(ops), layer.wanted(reference)) < layer.limit(reference)


def check_batches(layer: Layer, ops: Operators, together: torch.Tensor, orders: Sequence[list[int]]) -> None:
    """A row has the same bits beside any others, and cut otherwise."""
    new, before, starts = layer.case.new, layer.case.before, layer.case.starts
    for order in orders:
        picked = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])
        rows = layer.step([new[b] for b in order], [before[b] for b in order], order)
        assert same_bits(layer.run(ops, rows, picked), together[picked])


def check_any_batch(
    ops: Operators, heads: tuple[int, int], dim: int, window: int | None, device: str = "cpu"
) -> None:
    """A row of one token beside others of one token or more; more tokens beside others and cut otherwise."""
    case = Case(
        new=[1, 66, 1, 17], before=[300, 64, 0, 5], heads=heads, dim=dim, window=window, sinks=bool(window)
    )
    layer = Layer(case, device)
    together = layer.run(ops)
    check_batches(layer, ops, together, ([0, 2], [2, 3, 0]))
    for start, count in ((0, 40), (40, 26)):
        picked = slice(1 + start, 1 + start + count)
        assert same_bits(layer.run(ops, layer.step([count], [64 + start], [1]), picked), together[picked])


def check_sinks(case: Case, ops: Operators) -> None:
    """A sink without weight is none, and one of all weight leaves nothing."""
    layer = Layer(case)
    wanted = layer.run(ops)
    layer.sinks_H = torch.tensor([-torch.inf, 1e6, -1e6, 0])
    found = layer.run(ops)
    assert same_bits(found[:, [0, 2]], wanted[:, [0, 2]])
    is_wide = case.dtype == torch.float32
    assert bool((found[:, 1].abs() <= 1e-30 * is_wide).all())
    assert bool((torch.lt if is_wide else torch.le)(found[:, 3].abs(), wanted[:, 3].abs()).all())


def check_padding(case: Case, ops: Operators) -> None:
    """Zeros for the second row, and no change of the others."""
    layer = Layer(case)
    wanted, (_, start, end, *_) = layer.run(ops), case.starts
    layer.rows.lens_B[1] = 0
    found = layer.run(ops)
    assert bool((found[start:end] == 0).all())
    assert same_bits(found[:start], wanted[:start])
    assert same_bits(found[end:], wanted[end:])


def check_far(
    case: Case, ops: Operators, distance: int, allocate: Callable[[int], torch.Tensor], device: str = "cpu"
) -> None:
    """Compare near pages with pages `distance` elements into an arena, [size] from `allocate`."""
    layer = Layer(case, device)
    wanted = layer.run(ops)
    layer.cache, skipped = _far(near := layer.cache, distance, allocate)
    layer.cache[skipped:] = near
    assert same_bits(layer.run(ops, step(case.new, case.before, layer.pages + skipped)), wanted)


def check_store_far(
    case: Case, ops: Operators, distance: int, allocate: Callable[[int], torch.Tensor]
) -> None:
    layer = Storing(case)
    wanted = layer.run(ops)
    layer.cache, skipped = _far(near := layer.cache, distance, allocate)
    assert same_bits(layer.run(ops, step(case.new, case.before, layer.pages + skipped)), wanted)
    assert torch.equal(layer.cache[skipped:], near.nan_to_num())


def _far(
    near: torch.Tensor, distance: int, allocate: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """Return an arena that ends with as many pages as there are near, and how many are before them."""
    skipped = -(-distance // (2 * near[0].numel()))
    far = allocate((skipped + len(near)) * 2 * near[0].numel())
    return far.view(-1, near.shape[1], 2, *near.shape[2:])[:, :, 1], skipped


def check_large_scores(case: Case, ops: Operators, reference: Operators = REFERENCE) -> None:
    """The softmax does not overflow."""
    layer = Layer(case)
    layer.q_THD *= 1000
    assert relative_error(layer.run(ops), layer.wanted(reference)) < 10 * layer.limit(reference)


def check_gate(layer: Layer, ops: Operators) -> None:
    gate_THD = random(torch.Generator().manual_seed(1), *layer.q_THD.shape[:2], 2 * layer.case.dim)
    gate_THD = gate_THD.to(layer.case.dtype)[..., layer.case.dim :]
    memory = layer.cache, layer.rows, layer.case.window, layer.sinks_H
    found = ops.gated_attention(layer.q_THD, *memory, gate_THD)
    assert relative_error(found, sigmoid_mul(layer.wanted(), gate_THD.double())) < LIMITS[layer.case.dtype]


class Storing:
    """q (with a gate beside it), k and v side by side as one projection gives them, and two layers of NaN."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(sum(case.lens))
        tokens, dim, (q_heads, kv_heads) = sum(case.new), case.dim, case.heads
        projected_TI = random(draw, tokens, 2 * (q_heads + kv_heads) * dim).to(device, case.dtype)
        k_from = 2 * q_heads * dim
        self.q_THD = projected_TI[:, :k_from].view(tokens, q_heads, 2 * dim)[..., :dim]
        self.k_TKD, v_TKD = projected_TI[:, k_from:].view(tokens, 2, kv_heads, dim).unbind(1)
        self.v_TKD = None if case.latent else v_TKD
        weights = (1 + random(draw, 2, dim) / 10).to(device, case.dtype)
        self.weights: tuple[Any, Any] = (weights[0], weights[1]) if case.normed else (None, None)
        self.angles_T2R = random(draw, tokens, 2, case.rotary // 2).to(device)
        self.pages = shuffled_pages(case.lens, case.page_tokens, draw)
        self.arena = case.arena(self.pages, device)
        self.cache: Any = self.arena[:, :, 1]
        self.rows = step(case.new, case.before, self.pages)

    def run(self, ops: Operators, rows: Step | None = None, picked: slice = slice(None)) -> torch.Tensor:
        q_THD, k_TKD, angles_T2R = (x[picked] for x in (self.q_THD, self.k_TKD, self.angles_T2R))
        v_TKD = None if self.v_TKD is None else self.v_TKD[picked]
        rows = (rows or self.rows).to(q_THD.device)
        return ops.rope_store(q_THD, k_TKD, v_TKD, *self.weights, EPSILON, angles_T2R, self.cache, rows).cpu()

    def wanted(self, cache: Pages) -> torch.Tensor:
        """Return the result of the definition, which writes to `cache`."""
        q, k, angles = (x.cpu().double() for x in (self.q_THD, self.k_TKD, self.angles_T2R))
        v, q_weight, k_weight = (None if x is None else x.cpu().double() for x in (self.v_TKD, *self.weights))
        return REFERENCE.rope_store(q, k, v, q_weight, k_weight, EPSILON, angles, cache, self.rows)


STORES = {
    "decode": Case(new=[1] * 4, before=[0, 63, 64, 130], heads=(4, 2)),
    "decode float32": Case(new=[1] * 3, before=[0, 63, 64], dtype=torch.float32, heads=(3, 1)),
    "mixed": Case(new=[1, 3, 17, 1, 34], before=[64, 0, 50, 0, 31], heads=(2, 1)),
    "mixed float32": Case(
        new=[2, 1, 9], before=[15, 2, 40], page_tokens=16, heads=(2, 1), dtype=torch.float32
    ),
    "float32, bfloat16 pages": Case(
        new=[5, 1], before=[0, 7], dtype=torch.float32, cache_dtype=torch.bfloat16, heads=(6, 2), dim=256
    ),
    "bfloat16, float32 pages": Case(new=[5, 1], before=[0, 7], heads=(4, 2), cache_dtype=torch.float32),
    "odd": Case(new=[2, 17], before=[1, 30], page_tokens=1, heads=(5, 1), dim=63, rotary=20),
    "all turned": Case(new=[2, 7], before=[1, 3], page_tokens=7, heads=(1, 1), dim=34, rotary=34),
    "none turned": Case(new=[2, 7], before=[1, 3], heads=(1, 1), dim=1, rotary=0),
    "none turned nor normed": Case(new=[1, 5], before=[9, 3], heads=(2, 1), dim=32, rotary=0, normed=False),
    "decode, not normed": Case(new=[1] * 3, before=[0, 63, 64], heads=(6, 2), normed=False),
    "latents, decode": Case(
        new=[1] * 3, before=[0, 63, 64], heads=(16, 1), dim=144, normed=False, latent=True
    ),
    "latents, mixed float32": Case(
        new=[2, 1, 9], before=[15, 2, 40], page_tokens=16, heads=(3, 1), dim=40, rotary=8,
        dtype=torch.float32, normed=False, latent=True,
    ),
}  # fmt: skip


def check_store(case: Case, ops: Operators, device: str = "cpu") -> None:
    layer = Storing(case, device)
    pages = torch.full(layer.cache.shape, torch.nan, dtype=torch.float64)
    found, wanted, cache = layer.run(ops), layer.wanted(pages), layer.cache.cpu()
    assert relative_error(found, wanted) < LIMITS[case.dtype]
    assert torch.equal(cache.isnan(), pages.isnan())
    limit = max(LIMITS[case.dtype], LIMITS[case.page_dtype])
    assert relative_error(cache.nan_to_num(), pages.nan_to_num()) < limit
    assert bool(layer.arena[:, :, 0].isnan().all()), "the neighbouring layer was written"


def pages_like(cache: torch.Tensor, *, fixed: bool) -> Fp8:
    """Return pages of that shape, the middle layer of three in an arena, of NaN codes."""
    count, heads, parts, page_tokens, dim = cache.shape
    plane = page_tokens * (dim + 1)
    arena = torch.full((count, heads, 3, parts, plane), UNWRITTEN, dtype=torch.uint8)[:, :, 1]
    codes = arena[..., : page_tokens * dim].unflatten(3, (page_tokens, dim))
    return fixed_scales(codes, 125, 129) if fixed else Fp8(codes, arena[..., page_tokens * dim :])


def check_codes(case: Case, ops: Operators, *, fixed: bool, reference: Operators = REFERENCE) -> None:
    """Attention over codes has the bits of attention over their numbers in bfloat16, and a row alone too."""
    layer = Layer(case)
    written = ~layer.cache.isnan()
    pages = pages_like(layer.cache, fixed=fixed)
    if not fixed:
        scales = scale_of(layer.cache.float().nan_to_num().abs().amax(-1))
        pages.scales.copy_(torch.where(written[..., 0], scales, UNWRITTEN))
    pages.codes.copy_(torch.where(written, encode(layer.cache.nan_to_num(), pages.scales), UNWRITTEN))
    layer.cache = torch.where(written, decode(pages.codes, pages.scales).bfloat16(), torch.nan)
    numbers = layer.run(ops)
    layer.cache = pages
    found = layer.run(ops)
    assert same_bits(found, numbers)
    check_batches(layer, ops, found, [[1]])
    dtypes = {case.dtype, getattr(torch, reference.compute_dtype)}
    assert relative_error(found, layer.wanted(reference)) < max(LIMITS[dtype] for dtype in dtypes)


def check_stored_codes(case: Case, ops: Operators, *, fixed: bool) -> None:
    """The codes and scales of the definition, of numbers of any size and those that are none."""
    layer, draw = Storing(case), torch.Generator().manual_seed(3)
    odd = [torch.nan, -torch.inf, 0.0, -0.0, 1e-42, 448.0, -465.0, 2.0**-9, 2.0**-10]
    for x_TKD in (layer.k_TKD,) if layer.v_TKD is None else (layer.k_TKD, layer.v_TKD):
        x_TKD.mul_(2.0 ** torch.randint(-40, 40, (*x_TKD.shape[:2], 1), generator=draw))
        for token, value in enumerate(odd[: len(x_TKD)]):
            x_TKD[token, 0, token % case.dim] = value
        x_TKD[-1], x_TKD[-2] = 0.0, -1e-40
    found, wanted = (pages_like(layer.arena[:, :, 1], fixed=fixed) for _ in range(2))
    layer.cache = found
    layer.run(ops)
    layer.wanted(wanted)
    assert torch.equal(found.scales, wanted.scales)
    nans = found.codes % 128 == 127
    assert torch.equal(nans, wanted.codes % 128 == 127)
    assert torch.equal(found.codes[~nans], wanted.codes[~nans])
