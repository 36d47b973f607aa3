# pyright: basic
"""Pages of FP8 in Triton: the codes of the definition, and attention with the bits of their numbers in
bfloat16."""

from dataclasses import replace

import pytest
import torch

from tests.support.kernels.cases import same_bits
from tests.triton.test_attention import CASES, TAILS, Case, Layer
from tests.triton.test_rope_store import Case as StoreCase
from tests.triton.test_rope_store import Layer as StoreLayer
from tidemill.kernels.attention import cuda
from tidemill.kernels.rope_store import cuda as rope_store
from tidemill.kernels.rope_store import reference
from tidemill.kernels.shared.fp8 import Fp8, decode, encode, fixed_scales, scale_of

UNWRITTEN = 0x7F
SCALINGS = pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per token and head"])


def pages_like(cache: torch.Tensor, *, fixed: bool) -> Fp8:
    """Return pages of that shape, the middle layer of three in an arena, of NaN codes."""
    count, heads, parts, page_tokens, dim = cache.shape
    plane = page_tokens * (dim + 1)
    arena = torch.full((count, heads, 3, parts, plane), UNWRITTEN, dtype=torch.uint8)[:, :, 1]
    codes = arena[..., : page_tokens * dim].unflatten(3, (page_tokens, dim))
    return fixed_scales(codes, 125, 129) if fixed else Fp8(codes, arena[..., page_tokens * dim :])


CODED = {
    name: replace(CASES[name], dtype=torch.bfloat16, cache_dtype=None)
    for name in (
        "decode",
        "decode, odd",
        "mixed, sinks",
        "extend, pages of 16",
        "latents, mixed",
        "latents, decode",
        "mixed, window of 65",
        "mixed, pages of 16, window of 65",
    )
} | {"tails": TAILS}
CODED["decode, odd"] = replace(CODED["decode, odd"], page_tokens=12)


@SCALINGS
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_attention_has_the_bits_of_the_numbers_in_bfloat16(case: Case, *, fixed: bool) -> None:
    layer = Layer(case)
    written = ~layer.cache.isnan()
    pages = pages_like(layer.cache, fixed=fixed)
    if not fixed:
        scales = scale_of(layer.cache.float().nan_to_num().abs().amax(-1))
        pages.scales.copy_(torch.where(written[..., 0], scales, UNWRITTEN))
    pages.codes.copy_(torch.where(written, encode(layer.cache.nan_to_num(), pages.scales), UNWRITTEN))
    layer.cache = torch.where(written, decode(pages.codes, pages.scales).bfloat16(), torch.nan)
    found = cuda.attention(layer.q_THD, pages, layer.rows, layer.window, layer.sinks_H)
    assert same_bits(found, layer.run())


STORED = {
    "decode": StoreCase(new=[1] * 4, before=[0, 63, 64, 130], rotary=0, normed=False),
    "odd": StoreCase(
        new=[2, 17], before=[1, 30], page_tokens=12, heads=(5, 1), dim=63, rotary=0, normed=False
    ),
    "latents": StoreCase(
        new=[2, 1, 9], before=[15, 2, 40], heads=(3, 1), dim=40, rotary=0, normed=False, latent=True
    ),
}


@SCALINGS
@pytest.mark.parametrize("case", STORED.values(), ids=STORED)
def test_rope_store_writes_the_codes_of_the_definition(case: StoreCase, *, fixed: bool) -> None:
    layer = StoreLayer(case)
    draw = torch.Generator().manual_seed(3)
    for x_TKD in (layer.k_TKD,) if layer.v_TKD is None else (layer.k_TKD, layer.v_TKD):
        x_TKD.mul_(2.0 ** torch.randint(-30, 30, (*x_TKD.shape[:2], 1), generator=draw))
        x_TKD[0, 0, :3] = torch.tensor([torch.nan, -torch.inf, -0.0])
        x_TKD[1] = 0.0
    found, wanted = pages_like(layer.cache, fixed=fixed), pages_like(layer.cache, fixed=fixed)
    last = None, None, 1e-6, layer.angles_T2R
    q, k, v = layer.q_THD, layer.k_TKD, layer.v_TKD
    rope_store.rope_store(q, k, v, *last, found, layer.rows)
    reference.rope_store(q.float(), k.float(), None if v is None else v.float(), *last, wanted, layer.rows)
    assert torch.equal(found.scales, wanted.scales)
    nans = found.codes % 128 == 127
    assert torch.equal(nans, wanted.codes % 128 == 127)
    assert torch.equal(found.codes[~nans], wanted.codes[~nans])
