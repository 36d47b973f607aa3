# pyright: basic
"""Paged attention in Triton: its definition over odd sizes, NaN in unused memory, equal bits."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kernels.cases import (
    LIMITS,
    Step,
    int32,
    random,
    relative_error,
    same_bits,
    shuffled_pages,
    step,
)
from tidemill.kernels.activation.reference import sigmoid_mul
from tidemill.kernels.attention import cuda, lists, reference
from tidemill.kernels.shared import tiles
from tidemill.kernels.shared.rows import Made


@dataclass(frozen=True, kw_only=True)
class Case:
    new: Sequence[int]
    before: Sequence[int]
    page_tokens: int = 64
    heads: tuple[int, int] = (8, 2)
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    sinks: bool = False
    latent: bool = False

    @property
    def lens(self) -> list[int]:
        return [old + new for old, new in zip(self.before, self.new, strict=True)]


class Layer:
    """The second of two layers in an arena of NaN, written as far as the rows of a case go, and queries.

    Pages that have left the window are NaN, and the table has the unused page 0 in their place.
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(sum(case.lens))
        dtype = case.cache_dtype or case.dtype
        q_heads, kv_heads = case.heads
        self.q_THD = random(draw, sum(case.new), q_heads, case.dim).to(case.dtype)
        self.window, self.sinks_H = case.window, 3 * random(draw, q_heads) if case.sinks else None
        self.pages = shuffled_pages(case.lens, case.page_tokens, draw)
        written = torch.zeros(1 + int(self.pages.max()), case.page_tokens, dtype=torch.bool)
        for pages_N, before, length in zip(self.pages, case.before, case.lens, strict=True):
            left = 0 if case.window is None else max(0, before - case.window + 1) // case.page_tokens
            pages_N[:left] = 0
            token_N = torch.arange(left * case.page_tokens, length)
            written[pages_N[token_N // case.page_tokens].long(), token_N % case.page_tokens] = True
        shape = (len(written), kv_heads, 1 if case.latent else 2, case.page_tokens, case.dim)
        kv = torch.where(written[:, None, None, :, None], random(draw, *shape), torch.nan)
        arena = torch.full((len(written), kv_heads, 2, *shape[2:]), torch.nan, dtype=dtype, device=device)
        self.cache = arena[:, :, 1]
        self.cache.copy_(kv)
        self.rows = step(case.new, case.before, self.pages)

    def run(self, rows: Step | None = None, picked: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        device = self.cache.device
        sinks_H = None if self.sinks_H is None else self.sinks_H.to(device)
        rows = (rows or self.rows).to(device)
        return cuda.attention(self.q_THD[picked].to(device), self.cache, rows, self.window, sinks_H).cpu()

    def wanted(self) -> torch.Tensor:
        return reference.attention(
            self.q_THD.double(), self.cache.cpu(), self.rows, self.window, self.sinks_H
        )


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


def check(case: Case, device: str = "cpu") -> None:
    layer = Layer(case, device)
    limit = max(LIMITS[case.dtype], LIMITS[case.cache_dtype or case.dtype])
    assert relative_error(layer.run(), layer.wanted()) < limit


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("window", [None, 64, 65, 130, 192, 193, 400])
@pytest.mark.parametrize("length", [256, 257, 513])
def test_long_sequences_have_longer_spans(
    monkeypatch: pytest.MonkeyPatch, length: int, window: int | None
) -> None:
    """Spans have 64 tokens up to 256, 128 up to 512, 192 up to 768, two at a time; in windows up to 192 and
    384."""
    monkeypatch.setattr(cuda, "SPAN_TOKENS", 64)
    monkeypatch.setattr(cuda, "SPANS_MAX", 4)
    monkeypatch.setattr(cuda, "SPANS_AT_ONCE", 2)
    check(Case(new=[1], before=[length - 1], heads=(1, 1), dim=32, window=window, sinks=window is not None))


def test_rows_of_a_large_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(lists, "ENTRIES_AT_ONCE", 4)
    check(Case(new=[3, 1, 40, 2, 17], before=[1, 0, 60, 5, 0], heads=(1, 1), dim=32))


TAILS = Case(new=[4, 1, 64, 65, 2, 9], before=[700, 90, 500, 130, 3, 63], heads=(4, 2), dim=32)
"""Guesses, tails of up to 64 tokens and a longer one."""


@pytest.mark.parametrize(
    ("case", "limit", "value"),
    [
        (TAILS, "RESULTS_MAX", 1 << 20),
        (replace(TAILS, sinks=True), "RESULTS_MAX", 2048),
        # A short row of the longest text has programs for every span, and leaves none out.
        (Case(new=[3, 3], before=[250, 100], page_tokens=16, heads=(2, 1), dim=16), "SPANS_SHORT", 2),
        # One of two longer rows is behind a long text.
        (
            Case(new=[1, 70, 66, 3], before=[90, 400, 100, 500], heads=(4, 2), dim=32, sinks=True),
            "SPLIT_KEYS",
            400,
        ),
    ],
)
def test_rows_of_several_tokens_split_their_keys(
    monkeypatch: pytest.MonkeyPatch, case: Case, limit: str, value: int
) -> None:
    """Rows after a long text, whose keys are split: the definition, the same bits alone, and a gate."""
    monkeypatch.setattr(cuda, "SPAN_TOKENS", 64)
    monkeypatch.setattr(cuda, limit, value)
    layer = Layer(case)
    together = layer.run()
    assert relative_error(together, layer.wanted()) < LIMITS[case.dtype]
    starts = [0, *torch.tensor(case.new).cumsum(0).tolist()]
    for b, new in enumerate(case.new):
        picked = torch.arange(starts[b], starts[b + 1])
        rows = step([new], [case.before[b]], layer.pages[b : b + 1])
        assert same_bits(layer.run(rows, picked), together[picked])
    gate_THI = random(torch.Generator().manual_seed(1), sum(case.new), case.heads[0], 2 * case.dim).to(
        case.dtype
    )
    gate_THD = gate_THI[..., case.dim :]
    found = cuda.gated_attention(layer.q_THD, layer.cache, layer.rows, layer.window, layer.sinks_H, gate_THD)
    wanted = sigmoid_mul(layer.wanted(), gate_THD.double())
    assert relative_error(found, wanted) < LIMITS[case.dtype]


@pytest.mark.parametrize("name", ["mixed", "extend, pages of 128", "latents, mixed"])
def test_smaller_tiles_match_the_definition(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are those of GPUs with less shared memory, which have no copy engine."""
    monkeypatch.setattr(tiles, "shared_bytes", lambda: 99 << 10)
    check(CASES[name])


@pytest.mark.parametrize("split_keys", [1 << 14, 196, 195])
def test_no_entry_of_a_list_is_empty(split_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens see 704 keys, in spans of 256; 65 tokens of two query heads are two tiles; and so on."""
    monkeypatch.setattr(cuda, "SPLIT_KEYS", split_keys)
    made: Made = {}
    layer = Layer(TAILS)
    cuda.attention(layer.q_THD, layer.cache, layer.rows, None, None, made)
    (lists_KN,) = made.values()
    found = [
        [(entry >> 32, entry & 0xFFFFFFFF) for entry in of_K[1 : 1 + of_K[0]]] for of_K in lists_KN.tolist()
    ]
    parts = {
        lists.SINGLES: [(1, 1)],
        lists.SHORT: [(0, 3), (2, 3), (4, 1), (5, 1)],
        lists.ADDED: [(0, 1), (2, 8), (4, 1), (5, 2)],
        lists.LONG: [(3, 2)] if split_keys > 195 else [],
    }
    if split_keys < 1 << 14:
        parts[lists.SPLIT] = [(3, 2)] if split_keys == 195 else []
        parts[lists.SPLIT_ADDED] = [(3, 9)] if split_keys == 195 else []
    assert len(found) == len(parts)
    for kind, of_rows in parts.items():
        every = [(row, part) for row, count in of_rows for part in range(count)]
        assert found[kind] == every[::-1]


@pytest.mark.parametrize("programs", [1, 3])
def test_bits_do_not_depend_on_the_number_of_programs(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(cuda, "SPAN_TOKENS", 64)
    layer = Layer(replace(TAILS, new=[4, 1, 20, 65, 2], before=[200, 190, 0, 63, 3]))
    wanted = layer.run()
    monkeypatch.setattr(lists, "PROGRAMS", programs)
    assert same_bits(layer.run(), wanted)


def check_any_batch(heads: tuple[int, int], dim: int, window: int | None, device: str = "cpu") -> None:
    """A row of one token beside others of one token or more; more tokens beside others and cut otherwise."""
    case = Case(
        new=[1, 66, 1, 17], before=[300, 64, 0, 5], heads=heads, dim=dim, window=window, sinks=bool(window)
    )
    layer = Layer(case, device)
    together = layer.run()
    starts = [0, 1, 67, 68, 85]
    for order in ([0, 2], [2, 3, 0]):
        picked = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])
        rows = step([case.new[b] for b in order], [case.before[b] for b in order], layer.pages[order])
        assert same_bits(layer.run(rows, picked), together[picked])
    for start, count in ((0, 40), (40, 26)):
        rows = step([count], [64 + start], layer.pages[1:2])
        picked = slice(1 + start, 1 + start + count)
        assert same_bits(layer.run(rows, picked), together[picked])


@pytest.mark.parametrize("window", [None, 50, 280])
def test_same_bits_in_any_batch(window: int | None) -> None:
    check_any_batch((2, 1), 32, window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 5, 4]], ids=["decode", "mixed"])
def test_padding_gives_zeros_and_changes_no_row(new: list[int], window: int | None) -> None:
    layer = Layer(Case(new=new, before=[70, 0, 64], heads=(2, 1), dim=32, window=window, sinks=bool(window)))
    wanted = layer.run()
    layer.rows.lens_B[1] = 0
    found = layer.run()
    assert bool((found[1 : 1 + new[1]] == 0).all())
    assert same_bits(found[:1], wanted[:1])
    assert same_bits(found[1 + new[1] :], wanted[1 + new[1] :])


def test_row_of_no_tokens_is_left_out() -> None:
    layer = Layer(Case(new=[1, 5, 4], before=[70, 0, 64], heads=(2, 1), dim=32))
    assert len(layer.run(step([0], [3]), slice(0))) == 0
    wanted = layer.run()
    layer.rows.cu_B1.copy_(int32([0, 1, 1, 5]))
    assert same_bits(layer.run(picked=torch.tensor([0, 6, 7, 8, 9])), wanted[[0, 6, 7, 8, 9]])


def test_strided_queries() -> None:
    layer = Layer(Case(new=[1, 20], before=[70, 3], heads=(2, 1), dim=32))
    wanted = layer.run()
    layer.q_THD = torch.cat([layer.q_THD, layer.q_THD], dim=2)[..., :32]
    assert same_bits(layer.run(), wanted)


def check_far(page_tokens: int, allocate: Callable[[int], torch.Tensor], device: str = "cpu") -> None:
    """Compare near pages with pages 2^32 elements into an arena, bfloat16 [size] from `allocate`."""
    case = Case(new=[1, 20], before=[40, 30], page_tokens=page_tokens, heads=(2, 1), dim=32)
    layer = Layer(case, device)
    wanted = layer.run()
    near = layer.cache
    skipped = -(-(1 << 32) // (2 * near[0].numel()))
    far = allocate((skipped + len(near)) * 2 * near[0].numel())
    layer.cache = far.view(-1, near.shape[1], 2, *near.shape[2:])[:, :, 1]
    layer.cache[skipped:] = near
    layer.rows = step(case.new, case.before, layer.pages + skipped)
    assert same_bits(layer.run(), wanted)


FAR = pytest.mark.parametrize("page_tokens", [16, 64], ids=["pointers", "descriptor"])


@FAR
def test_pages_far_into_the_arena(tmp_path: Path, page_tokens: int) -> None:
    """The arena is a file that has blocks only where it is written."""

    def sparse(size: int) -> torch.Tensor:
        return torch.from_file(str(tmp_path / "arena"), shared=True, size=size, dtype=torch.bfloat16)

    check_far(page_tokens, sparse)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("new", [[1, 1], [1, 70]], ids=["decode", "mixed"])
def test_sink_of_no_weight_is_none_and_one_of_all_weight_leaves_nothing(
    new: list[int], window: int | None
) -> None:
    layer = Layer(Case(new=new, before=[300, 30], heads=(4, 2), dim=32, window=window))
    wanted = layer.run()
    layer.sinks_H = torch.tensor([-torch.inf, 1e6, -1e6, 0])
    found = layer.run()
    assert same_bits(found[:, [0, 2]], wanted[:, [0, 2]])
    assert bool((found[:, 1] == 0).all())
    assert bool((found[:, 3].abs() <= wanted[:, 3].abs()).all())


def test_large_scores_do_not_overflow() -> None:
    layer = Layer(Case(new=[1, 20], before=[40, 30], heads=(1, 1), dtype=torch.float32, dim=16))
    layer.q_THD *= 1000
    assert relative_error(layer.run(), layer.wanted()) < 1e-4


@pytest.mark.parametrize("gib", [0.001, 1, 2, 3, 4, 6, 8, 12, 40, 128])
def test_no_large_arena_is_taken_for_a_small_tensor(gib: float) -> None:
    """The sum is that of `driver.c` of Triton 3.7, in an int."""
    page_bytes, last_bytes = 12 * (128 << 10), (128 << 10) - 2  # twelve layers, of two heads of 256
    for more in range(40):
        pages = int(gib * (1 << 30)) // page_bytes + 1 + 71 * more
        found = cuda.described(pages, page_bytes, last_bytes)
        assert pages <= found <= pages + (1 << 31) // page_bytes + 1
        if (pages - 1) * page_bytes + last_bytes >= 128 << 10:
            assert ctypes.c_int32((found - 1) * page_bytes + last_bytes).value + 1 >= 128 << 10
    assert cuda.described(1, page_bytes, last_bytes) == 1
