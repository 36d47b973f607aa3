# pyright: basic
"""`rope_store` and `rope_angles` in Triton: their definition over odd sizes; other memory stays unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import LIMITS, random, relative_error, same_bits, shuffled_pages, step
from tidemill.kernels.rope_store import cuda, reference

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    new: Sequence[int]
    before: Sequence[int]
    page_tokens: int = 64
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    rotary: int = 32
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    normed: bool = True
    latent: bool = False


class Layer:
    """q (with a gate beside it), k and v side by side as one projection gives them, and two layers of NaN."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        lens = [old + new for old, new in zip(case.before, case.new, strict=True)]
        draw = torch.Generator().manual_seed(sum(lens))
        tokens, dim, (q_heads, kv_heads) = sum(case.new), case.dim, case.heads
        projected_TI = random(draw, tokens, 2 * (q_heads + kv_heads) * dim).to(device, case.dtype)
        k_from = 2 * q_heads * dim
        self.q_THD = projected_TI[:, :k_from].view(tokens, q_heads, 2 * dim)[..., :dim]
        self.k_TKD, v_TKD = projected_TI[:, k_from:].view(tokens, 2, kv_heads, dim).unbind(1)
        self.v_TKD = None if case.latent else v_TKD
        weights = (1 + random(draw, 2, dim) / 10).to(device, case.dtype)
        self.q_weight_D, self.k_weight_D = weights if case.normed else (None, None)
        self.angles_T2R = random(draw, tokens, 2, case.rotary // 2).to(device)
        self.pages = shuffled_pages(lens, case.page_tokens, draw)
        shape = (1 + int(self.pages.max()), kv_heads, 2, 1 if case.latent else 2, case.page_tokens, dim)
        self.arena = torch.full(shape, torch.nan, dtype=case.cache_dtype, device=device)
        self.cache = self.arena[:, :, 1]
        self.rows = step(case.new, case.before, self.pages)

    def run(self) -> torch.Tensor:
        rows = self.rows.to(self.cache.device)
        q_weight_D, k_weight_D, angles_T2R = self.q_weight_D, self.k_weight_D, self.angles_T2R
        return cuda.rope_store(
            self.q_THD, self.k_TKD, self.v_TKD, q_weight_D, k_weight_D, EPSILON, angles_T2R, self.cache, rows
        ).cpu()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expected result, and the expected content of the pages."""
        cache = torch.full(self.cache.shape, torch.nan, dtype=torch.float64)
        q, k, angles = (x.cpu().double() for x in (self.q_THD, self.k_TKD, self.angles_T2R))
        v, q_weight, k_weight = (
            None if x is None else x.cpu().double() for x in (self.v_TKD, self.q_weight_D, self.k_weight_D)
        )
        out = reference.rope_store(q, k, v, q_weight, k_weight, EPSILON, angles, cache, self.rows)
        return out, cache


CASES = {
    "decode": Case(new=[1] * 4, before=[0, 63, 64, 130]),
    "decode float32": Case(
        new=[1] * 3, before=[0, 63, 64], dtype=torch.float32, cache_dtype=torch.float32, heads=(3, 1)
    ),
    "mixed": Case(new=[1, 3, 17, 1, 34], before=[64, 0, 50, 0, 31], heads=(2, 1)),
    "mixed float32": Case(
        new=[2, 1, 9],
        before=[15, 2, 40],
        page_tokens=16,
        heads=(2, 1),
        dtype=torch.float32,
        cache_dtype=torch.float32,
    ),
    "float32, bfloat16 pages": Case(new=[5, 1], before=[0, 7], dtype=torch.float32, heads=(6, 2), dim=256),
    "bfloat16, float32 pages": Case(new=[5, 1], before=[0, 7], cache_dtype=torch.float32),
    "odd": Case(new=[2, 17], before=[1, 30], page_tokens=1, heads=(5, 1), dim=63, rotary=20),
    "all turned": Case(new=[2, 7], before=[1, 3], page_tokens=7, heads=(1, 1), dim=34, rotary=34),
    "none turned": Case(new=[2, 7], before=[1, 3], heads=(1, 1), dim=1, rotary=0),
    "none turned nor normed": Case(new=[1, 5], before=[9, 3], heads=(2, 1), dim=32, rotary=0, normed=False),
    "decode, not normed": Case(new=[1] * 3, before=[0, 63, 64], heads=(6, 2), normed=False),
    "latents, decode": Case(
        new=[1] * 3, before=[0, 63, 64], heads=(16, 1), dim=144, normed=False, latent=True
    ),
    "latents, mixed float32": Case(
        new=[2, 1, 9],
        before=[15, 2, 40],
        page_tokens=16,
        heads=(3, 1),
        dim=40,
        rotary=8,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        normed=False,
        latent=True,
    ),
}


def check(case: Case, device: str = "cpu") -> None:
    layer = Layer(case, device)
    found = layer.run()
    wanted, pages = layer.wanted()
    cache = layer.cache.cpu()
    limit = LIMITS[torch.bfloat16 if torch.bfloat16 in {case.dtype, case.cache_dtype} else torch.float32]
    assert relative_error(found, wanted) < LIMITS[case.dtype]
    assert torch.equal(cache.isnan(), pages.isnan())
    assert relative_error(cache.nan_to_num(), pages.nan_to_num()) < limit
    assert bool(layer.arena[:, :, 0].isnan().all()), "the neighbouring layer was written"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case)


def test_values_are_stored_as_they_are() -> None:
    layer = Layer(Case(new=[3], before=[0], page_tokens=16, cache_dtype=torch.float32))
    layer.run()
    assert layer.v_TKD is not None
    assert torch.equal(layer.cache[1, :, 1, :3].transpose(0, 1), layer.v_TKD.float())


def test_rows_of_a_large_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ROWS_AT_ONCE", 2)
    check(Case(new=[3, 1, 4, 2, 1], before=[1, 0, 60, 5, 0], heads=(1, 1), dim=32))


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 2, 3]], ids=["decode", "mixed"])
def test_padding_stores_nothing(new: list[int]) -> None:
    layer = Layer(Case(new=new, before=[70, 0, 64], heads=(1, 1), dim=32))
    wanted = layer.run()
    stored = layer.cache.clone()
    layer.cache.fill_(torch.nan)
    layer.rows.lens_B[1] = 0
    assert same_bits(layer.run(), wanted), "queries of padding are finite too"
    stored[int(layer.pages[1, 0])] = torch.nan
    assert torch.equal(layer.cache.isnan(), stored.isnan())
    assert torch.equal(layer.cache.nan_to_num(), stored.nan_to_num())


def test_tokens_of_no_row_store_nothing() -> None:
    layer = Layer(Case(new=[1, 2, 3], before=[70, 0, 64], heads=(1, 1), dim=32))
    layer.rows.cu_B1[-2:] = 3
    layer.rows.lens_B[2] = 0
    layer.run()
    assert bool(layer.cache[layer.pages[2, :2].long()].isnan().all())
    assert int((~layer.cache.isnan()).sum()) == 3 * 2 * 32


def test_pages_far_into_the_arena(tmp_path: Path) -> None:
    """2^32 elements away, in a file that has blocks only where it is written."""
    layer = Layer(Case(new=[1, 3], before=[40, 30], page_tokens=16, heads=(1, 1), dim=32))
    wanted, near = layer.run(), layer.cache
    skipped = -(-(1 << 32) // (2 * near[0].numel()))
    size = (skipped + len(near)) * 2 * near[0].numel()
    far = torch.from_file(str(tmp_path / "arena"), shared=True, size=size, dtype=near.dtype)
    layer.cache = far.view(-1, near.shape[1], 2, *near.shape[2:])[:, :, 1]
    layer.rows = step([1, 3], [40, 30], layer.pages + skipped)
    assert same_bits(layer.run(), wanted)
    assert torch.equal(layer.cache[skipped:], near.nan_to_num())


def test_angles() -> None:
    positions_T = torch.tensor([0, 1, 63, 64, 1000])
    frequencies_R = 1 / 10_000.0 ** (torch.arange(16) / 16)
    wanted = reference.rope_angles(positions_T, frequencies_R.double())
    assert relative_error(cuda.rope_angles(positions_T, frequencies_R), wanted) < 1e-5
