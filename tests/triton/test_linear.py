"""Products with codes in Triton: parity of each kind and operator, the order of sums, what `pack` keeps."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.support.kernels.cases import random, relative_error, same_bits
from tests.unit.kernels.test_stored import CODE_KINDS, stored
from tidemill.kernels.activation.reference import silu_mul
from tidemill.kernels.linear import cuda, reference, tiles
from tidemill.kernels.linear.factors import taken
from tidemill.kernels.linear.stored import Kind, Stored, plain


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: Kind
    out: int
    depth: int
    group: int
    shifted: bool

    @property
    def stored(self) -> Stored:
        return stored(self.kind, self.out, self.depth, self.group, shifted=self.shifted)


SIZES = ((70, 144, 16), (66, 96, 32), (130, 384, 128), (6, 576, 192), (34, 100, 100), (2, 34, 34))
CASES = {
    f"{kind} {out} x {depth} in groups of {group}": Case(
        kind=kind, out=out, depth=depth, group=group, shifted=(kind == "uint4") != (group == 32)
    )
    for kind in CODE_KINDS
    for out, depth, group in SIZES
}
INTEGERS = {
    f"w8a8 {out} x {depth}": Case(kind="w8a8", out=out, depth=depth, group=depth, shifted=False)
    for out, depth in ((70, 144), (66, 97), (130, 1300), (6, 576), (1, 1))
}


def on(part: Stored, device: str) -> Stored:
    return part.moved(lambda rows: rows.to(device))


def truth(x: Tensor, part: Stored, bias_N: Tensor | None = None) -> Tensor:
    return reference.linear(x.double(), reference.pack([part], bias_N, "bfloat16"))


def check(case: Case, device: str = "cpu") -> None:
    """Against the definition in float64, on the host: each factor, then sums of 1 to 65 rows."""
    part, draw = case.stored, torch.Generator().manual_seed(0)
    weight = cuda.pack([on(part, device)])
    assert weight.kind == case.kind
    factors = part.factors("bfloat16").float()
    found = cuda.logits(torch.eye(case.depth, device=device), weight).cpu().T
    # A product and an offset may be rounded together.
    assert torch.equal(found, factors) if device == "cpu" else relative_error(found, factors) < 1e-2
    bias_N = random(draw, case.out).bfloat16()
    biased = cuda.pack([on(part, device)], bias_N.to(device))
    for rows in (1, 3, 17, 65):
        x = random(draw, rows, case.depth + 16)[:, 16:].bfloat16()  # a slice of wider rows
        assert relative_error(cuda.logits(x.to(device), weight).cpu(), truth(x, part)) < 1e-5
        y, wanted = cuda.linear(x.to(device), biased), truth(x, part, bias_N)
        assert y.dtype == torch.bfloat16
        assert relative_error(y.cpu(), wanted) < 1e-2
    if case.out % 2 == 0:
        gated = cuda.linear_silu(x.to(device), biased, weight)
        assert relative_error(gated.cpu(), silu_mul(wanted)) < 1e-2
    heads = part.moved(lambda rows: rows.view(2, case.out // 2, -1))
    x_THI = random(draw, 5, 2, case.depth + 3)[..., 3:].bfloat16()
    found = cuda.linear_heads(x_THI.to(device), cuda.pack([on(heads, device)]))
    wide = reference.pack([heads], None, "bfloat16")
    assert found.is_contiguous()
    assert relative_error(found.cpu(), reference.linear_heads(x_THI.double(), wide)) < 1e-2


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_match_the_definition(case: Case) -> None:
    check(case)


def check_integers(case: Case, device: str = "cpu") -> None:
    """Against the definition, whose codes of x they have: sums are exact."""
    part, draw = case.stored, torch.Generator().manual_seed(0)
    bias_N = random(draw, case.out).bfloat16()
    weight, biased = (cuda.pack([on(part, device)], bias) for bias in (None, bias_N.to(device)))
    assert weight.kind == "w8a8"
    for rows in (1, 3, 17, 65, 130):
        x = random(draw, rows, case.depth + 16)[:, 16:]  # a slice of wider rows
        x[rows // 2], x[rows // 3] = 0, x[rows // 3] * 1e-20
        for given in (x, x.bfloat16()):
            codes, scales = taken(given.to(device), weight)
            wanted_codes, wanted_scales = reference.quantised(given)
            assert scales is not None
            assert torch.equal(codes.cpu(), wanted_codes)
            assert same_bits(scales.cpu()[:, None], wanted_scales)
            wanted = truth(given, part)
            assert relative_error(cuda.logits(given.to(device), weight).cpu(), wanted) < 1e-6
            y = cuda.linear(given.to(device), biased)
            assert y.dtype == torch.bfloat16
            assert relative_error(y.cpu(), wanted + bias_N.double()) < 1e-2
    broken = torch.tensor([[1.0] * case.depth, [torch.nan] * case.depth, [torch.inf] * case.depth])
    found = cuda.logits(broken.to(device), weight).cpu()
    assert found.isnan().all(-1).tolist() == [False, True, True]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf * 0
@pytest.mark.parametrize("case", INTEGERS.values(), ids=INTEGERS)
def test_products_of_integers_match_the_definition(case: Case) -> None:
    check_integers(case)


@pytest.mark.parametrize(("rows", "depth", "spans"), [(3, 1300, 2), (17, 1664, 3), (2, 512, 1)])
def test_spans_have_one_sum_by_one_program_and_by_several(
    rows: int, depth: int, spans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(depth)
    part, bias_N = stored("int8", 70, depth, depth, shifted=False), random(draw, 70).bfloat16()
    x, weight = random(draw, rows, depth).bfloat16(), cuda.pack([part], bias_N)
    span = tiles.span_of(1, 70, depth)
    assert -(-depth // span) == spans
    apart = cuda.logits(x, weight)
    assert relative_error(apart, truth(x, part, bias_N)) < 1e-5
    monkeypatch.setattr(tiles, "span_of", lambda *_: span)
    monkeypatch.setattr(tiles, "PROGRAMS", 1)
    assert same_bits(cuda.logits(x, weight), apart)


def test_parts_of_several_kinds_are_segments() -> None:
    """Gates lie beside the projections of a linear layer; one part is of a group that no kernel takes."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        stored("int4", 20, 96, 32, shifted=False), stored("int4", 9, 96, 32, shifted=False),
        plain(random(draw, 7, 96).bfloat16()), stored("fp8", 5, 96, 48, shifted=False),
        plain(random(draw, 3, 96)), stored("uint4", 11, 96, 96, shifted=True),
    ]  # fmt: skip
    bias_N, x = random(draw, 55), random(draw, 4, 96).bfloat16()
    weight = cuda.pack(parts, bias_N)
    kinds = [(part.kind, part.out_features) for part in weight.segments]
    assert kinds == [("int4", 29), ("bfloat16", 12), ("float32", 3), ("uint4", 11)]
    wanted = torch.cat([truth(x, part) for part in parts], -1) + bias_N
    assert relative_error(cuda.linear(x, weight), wanted) < 1e-2
    assert relative_error(cuda.logits(x, weight), wanted) < 1e-2  # biases beside codes are bfloat16


def test_codes_that_no_kernel_takes_are_widened() -> None:
    odd = stored("int8", 5, 96, 48, shifted=False)
    packed = cuda.pack([odd])
    assert (packed.kind, packed.scales) == ("bfloat16", None)
    assert torch.equal(packed.data, odd.factors("bfloat16"))


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [
        (2.0**-20, torch.bfloat16),
        (1.0009765625, torch.float16),
        (1.0001, torch.float32),
        (1e30, torch.float32),
    ],
)
def test_scales_take_16_bits_where_these_hold_them(scales: float, dtype: torch.dtype) -> None:
    part = stored("fp4", 4, 64, 32, shifted=False)
    packed = cuda.pack([replace(part, scales=torch.full((4, 2), scales))])
    assert packed.scales is not None
    assert (packed.scales.dtype, packed.scales.shape) == (dtype, (2, 4))


def test_no_rows_are_no_launch() -> None:
    weight = cuda.pack([stored("int4", 6, 64, 32, shifted=False)])
    assert cuda.linear(torch.empty(0, 64), weight).shape == (0, 6)
