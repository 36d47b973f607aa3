"""`rope_store` and `rope_angles` in Triton: their definition over odd sizes; other memory stays unchanged."""

from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import relative_error, same_bits
from tests.support.kernels.paged import (
    SCALINGS,
    STORES,
    Case,
    Storing,
    check_store,
    check_store_far,
    check_stored_codes,
)
from tidemill.kernels.dispatch import operators
from tidemill.kernels.rope_store import cuda, reference

OURS = operators("triton", Path())


@pytest.mark.parametrize("case", STORES.values(), ids=STORES)
def test_matches_the_definition(case: Case) -> None:
    check_store(case, OURS)


def test_values_are_stored_as_they_are() -> None:
    layer = Storing(Case(new=[3], before=[0], page_tokens=16, heads=(4, 2), cache_dtype=torch.float32))
    layer.run(OURS)
    assert layer.v_TKD is not None
    assert torch.equal(layer.arena[:, :, 1][1, :, 1, :3].transpose(0, 1), layer.v_TKD.float())


def test_rows_of_a_large_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ROWS_AT_ONCE", 2)
    check_store(Case(new=[3, 1, 4, 2, 1], before=[1, 0, 60, 5, 0], heads=(1, 1), dim=32), OURS)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 2, 3]], ids=["decode", "mixed"])
def test_padding_stores_nothing(new: list[int]) -> None:
    layer = Storing(Case(new=new, before=[70, 0, 64], heads=(1, 1), dim=32))
    wanted = layer.run(OURS)
    cache = layer.arena[:, :, 1]
    stored = cache.clone()
    cache.fill_(torch.nan)
    layer.rows.lens_B[1] = 0
    assert same_bits(layer.run(OURS), wanted), "queries of padding are finite too"
    stored[int(layer.pages[1, 0])] = torch.nan
    assert torch.equal(cache.isnan(), stored.isnan())
    assert torch.equal(cache.nan_to_num(), stored.nan_to_num())


def test_tokens_of_no_row_store_nothing() -> None:
    layer = Storing(Case(new=[1, 2, 3], before=[70, 0, 64], heads=(1, 1), dim=32))
    layer.rows.cu_B1[-2:] = 3
    layer.rows.lens_B[2] = 0
    layer.run(OURS)
    assert bool(layer.arena[:, :, 1][layer.pages[2, :2].long()].isnan().all())
    assert int((~layer.arena[:, :, 1].isnan()).sum()) == 3 * 2 * 32


def test_pages_far_into_the_arena(tmp_path: Path) -> None:
    """2^32 elements away, in a file that has blocks only where it is written."""

    def sparse(size: int) -> torch.Tensor:
        return torch.from_file(str(tmp_path / "arena"), shared=True, size=size, dtype=torch.bfloat16)

    case = Case(new=[1, 3], before=[40, 30], page_tokens=16, heads=(1, 1), dim=32)
    check_store_far(case, OURS, 1 << 32, sparse)


CODED = {
    "decode": Case(new=[1] * 4, before=[0, 63, 64, 130], heads=(4, 2), rotary=0, normed=False),
    "odd": Case(new=[2, 17], before=[1, 30], page_tokens=12, heads=(5, 1), dim=63, rotary=0, normed=False),
    "latents": Case(
        new=[2, 1, 9], before=[15, 2, 40], heads=(3, 1), dim=40, rotary=0, normed=False, latent=True
    ),
}


@SCALINGS
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_stored_codes_are_those_of_the_definition(case: Case, *, fixed: bool) -> None:
    check_stored_codes(case, OURS, fixed=fixed)


def test_angles() -> None:
    positions_T = torch.tensor([0, 1, 63, 64, 1000])
    frequencies_R = 1 / 10_000.0 ** (torch.arange(16) / 16)
    wanted = reference.rope_angles(positions_T, frequencies_R.double())
    assert relative_error(cuda.rope_angles(positions_T, frequencies_R), wanted) < 1e-5
