"""A fake of FlashInfer computes attention from the addresses, strides and tables that it gets, as the
documentation of FlashInfer describes them."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.kernels.cases import int32, random, relative_error, shuffled_pages, step
from tidemill.kernels.activation.reference import sigmoid_mul
from tidemill.kernels.attention import reference
from tidemill.kernels.attention.flashinfer import FlashInfer, check, installed, tables_of
from tidemill.kernels.shared.build import KernelUnavailable
from tidemill.kernels.shared.fp8 import Fp8
from tidemill.kernels.shared.rows import Made

PAGE = 16


class Fake:
    """BatchPrefillWithPagedKVCacheWrapper for the layout HND."""

    plans = 0

    def plan(self, *tables: Any, **options: Any) -> None:  # noqa: ANN401
        Fake.plans += 1
        qo_indptr, kv_indptr, indices, last_page_len, *self.sizes = tables
        assert {table.dtype for table in tables[:4]} == {torch.int32}
        assert options["causal"]
        self.tables = [table.tolist() for table in (qo_indptr, kv_indptr, indices, last_page_len)]
        self.window, self.scale = options["window_left"], options["sm_scale"]

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qo_indptr, kv_indptr, indices, last_page_len = self.tables
        heads, kv_heads, dim, page_size = self.sizes
        assert q.shape[1:] == (heads, dim)
        out = torch.empty(q.shape, dtype=torch.float64)
        for b, last in enumerate(last_page_len):
            pages = indices[kv_indptr[b] : kv_indptr[b + 1]]
            length = (len(pages) - 1) * page_size + last
            tokens = q[qo_indptr[b] : qo_indptr[b + 1]].double()
            position = length - len(tokens) + torch.arange(len(tokens))
            key = torch.arange(length)
            seen = key[None, :] <= position[:, None]
            if self.window >= 0:
                seen &= key[None, :] >= position[:, None] - self.window
            for head in range(heads):
                own = head * kv_heads // heads
                k, v = (
                    torch.stack([at(cache, pages[n // page_size], own, n % page_size) for n in range(length)])
                    for cache in paged_kv_cache
                )
                score = (tokens[:, head] @ k.double().T * self.scale).masked_fill(~seen, -torch.inf)
                out[qo_indptr[b] : qo_indptr[b + 1], head] = score.softmax(-1) @ v.double()
        return out.to(q.dtype)


def at(cache: torch.Tensor, page: int, head: int, token: int) -> torch.Tensor:
    """Read a vector from its address, as the kernels do."""
    page_stride, head_stride, token_stride, _ = cache.stride()
    where = page * page_stride + head * head_stride + token * token_stride
    return torch.as_strided(cache, (cache.shape[3],), (1,), cache.storage_offset() + where)


def layer(lens: list[int], window: int | None, new: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of two layers, NaN but for what queries see in the second, and the page tables."""
    draw = torch.Generator().manual_seed(0)
    pages_BN = shuffled_pages(lens, PAGE, draw)
    arena = torch.full((1 + int(pages_BN.max()), 2, 2, 2, PAGE, 64), torch.nan, dtype=torch.bfloat16)
    for row, (length, count) in enumerate(zip(lens, new, strict=True)):
        left = 0 if window is None else max(0, length - count - window + 1) // PAGE
        for token in range(left * PAGE, length):
            page = pages_BN[row, token // PAGE]
            arena[page, :, 1, :, token % PAGE] = random(draw, 2, 2, 64).bfloat16()
        pages_BN[row, :left] = -1
    return arena, pages_BN


def check_rows(window: int | None, operator: FlashInfer, device: str = "cpu") -> None:
    """Prompts, the end of one, and rows of one token, beside unused memory that is NaN."""
    new, before = [1, 5, 33, 1, 1], [50, 30, 0, 15, 16]
    lens = [old + count for old, count in zip(before, new, strict=True)]
    arena, pages_BN = layer(lens, window, new)
    cache = arena[:, :, 1]
    rows = step(new, before, pages_BN)
    q_THD = random(torch.Generator().manual_seed(1), sum(new), 4, 128)[..., 64:]
    there = arena.to(device)[:, :, 1], rows.to(device), window, None
    found = operator.attention(q_THD.bfloat16().to(device), *there).cpu()
    wanted = reference.attention(q_THD.bfloat16().double(), cache, rows, window, None)
    assert relative_error(found, wanted) < 1e-2
    gate_THD = random(torch.Generator().manual_seed(2), *q_THD.shape)
    gated = operator.gated_attention(q_THD.bfloat16().to(device), *there, gate_THD.to(device)).cpu()
    assert relative_error(gated, sigmoid_mul(wanted, gate_THD.double())) < 1e-2


@pytest.mark.parametrize("window", [None, 20])
def test_fake_computes_attention_from_what_it_gets(window: int | None) -> None:
    check_rows(window, FlashInfer(lambda _device: Fake(), sigmoid_mul))


def test_layers_of_a_step_share_one_plan() -> None:
    arena, pages_BN = layer([20], None, [1])
    cache, rows = arena[:, :, 1], step([1], [19], pages_BN)
    q_THD = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    operator = FlashInfer(lambda _device: Fake(), sigmoid_mul)
    Fake.plans = 0
    steps: list[Made] = [{}, {}]
    for made in steps:
        for window in (None, 8, None, 8):
            operator.attention(q_THD, cache, rows, window, None, made)
    assert Fake.plans == 4, "one for each window and step"


def test_padding_has_no_pages() -> None:
    rows = step([1, 1], [16, 0], int32([[4, 2], [9, 9]]))
    rows.lens_B[1] = 0
    tables = tables_of(rows, PAGE, None)
    assert tables.kv_indptr.tolist() == [0, 2, 2]
    assert tables.kv_indices.tolist() == [4, 2]


PAGES = torch.empty(3, 2, 2, PAGE, 64, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: (64, PAGES.float(), None), "pages in bfloat16, not float32"),
        (lambda: (64, Fp8(PAGES.byte(), PAGES.byte()), None), "pages in bfloat16, not FP8"),
        (lambda: (64, PAGES[:, :, :1], None), "latents"),
        (lambda: (80, PAGES, None), "heads of 64, 128 or 256, and this model's have 80"),
        (lambda: (64, PAGES, PAGES[0, 0, 0, :, 0]), "no attention sinks"),
        (lambda: (64, PAGES.as_strided(PAGES.shape, (1 << 32, 1, 1, 1, 1)), None), "strides below"),
        (lambda: (64, PAGES.transpose(3, 4), None), "strides below"),
    ],
)
def test_pages_that_do_not_fit_are_refused_by_name(change: Callable[[], Any], message: str) -> None:
    with pytest.raises(KernelUnavailable, match=message):
        check(*change())


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="it is installed")
def test_missing_library_is_named() -> None:
    with pytest.raises(KernelUnavailable, match="pip install flashinfer-python"):
        installed(sigmoid_mul)
