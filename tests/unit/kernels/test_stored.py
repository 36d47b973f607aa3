"""Weights as a folder stores them: what a code stands for, rows that move and join as codes, and products
with the bits of those of the widened weights."""

from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import COMPUTE_DTYPES, random, same_bits
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.linear.cpu import is_kept
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import FOUR_BITS, Kind, Stored, join, plain, runs, stack
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice
from tidemill.kernels.shared.compute_dtype import ComputeDtype

CODE_KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4", "uint4", "fp4")

SHAPES = (1, 2, 2), (17, 70, 70), (33, 64, 64), (130, 96, 32), (64, 80, 16), (300, 600, 40), (9, 1030, 1030)
"""Outputs, inputs, and inputs of a group."""


def stored(kind: Kind, rows: int, columns: int, group: int, *, shifted: bool, seed: int = 0) -> Stored:
    """Random codes, scales and offsets."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    elif kind in {"int8", "w8a8"}:
        codes = torch.randint(-128, 128, (rows, columns), generator=draw, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
    scales = torch.rand(rows, columns // group, generator=draw)
    return Stored(codes, kind, scales, torch.randn(scales.shape, generator=draw) if shifted else None)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("kind", CODE_KINDS)
def test_value_is_a_number_times_its_scale_plus_its_offset(kind: Kind, *, shifted: bool) -> None:
    given = stored(kind, 3, 12, 4, shifted=shifted)
    assert given.scales is not None
    for row in range(3):
        for column in range(12):
            if kind in FOUR_BITS:
                number = FOUR_BITS[kind][int(given.codes[row, column // 2]) >> 4 * (column % 2) & 15]
            else:
                number = float(given.codes[row, column])
            wanted = torch.tensor(number) * given.scales[row, column // 4]
            if given.offsets is not None:
                wanted += given.offsets[row, column // 4]
            assert given.values[row, column] == wanted
    assert (given.columns, given.group) == (12, 4)


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_codes_move_and_join_as_their_values(kind: Kind) -> None:
    one, two = (stored(kind, 4, 16, 8, shifted=kind == "uint4", seed=seed) for seed in range(2))
    values = torch.cat([one.values, two.values])
    assert torch.equal(join([one, two]).values, values)
    assert torch.equal(stack([one, two]).values, values.view(2, 4, 16))
    moved = join([one, two]).moved(lambda rows: rows[torch.arange(8).flip(0)])
    assert torch.equal(moved.values, values.flip(0))
    assert join([one, two]).kind == kind


def test_neighbours_of_one_kind_join() -> None:
    rows = torch.ones(1, 16, dtype=torch.bfloat16)
    parts = [stored("int4", 2, 16, 8, shifted=False), stored("int4", 1, 16, 8, shifted=False), plain(rows)]
    parts.append(stored("int4", 1, 16, 4, shifted=False))
    found = list(runs(parts))
    assert [(part.kind, part.group, len(part.codes)) for part in found] == [
        ("int4", 8, 3),
        ("bfloat16", 0, 1),
        ("int4", 4, 1),
    ]
    assert torch.equal(join(parts).values, torch.cat([part.values.bfloat16() for part in parts]))


def widened(given: Stored, compute_dtype: ComputeDtype) -> Stored:
    return plain(given.factors(compute_dtype))


def both(ops: Operators, given: Stored, compute_dtype: ComputeDtype) -> tuple[Packed, Packed]:
    packed = ops.pack([given], None)
    assert packed.kind == given.kind
    return packed, ops.pack([widened(given, compute_dtype)], None)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("kind", CODE_KINDS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_linear_has_the_bits_of_widened_weights(
    kernel_cache: Path, compute_dtype: ComputeDtype, kind: Kind, *, shifted: bool
) -> None:
    cpu, draw = operators("cpu", kernel_cache, compute_dtype), torch.Generator().manual_seed(0)
    for n, k, group in SHAPES:
        codes, wide = both(cpu, stored(kind, n, k, group, shifted=shifted), compute_dtype)
        for rows in (1, 2, 3, 5, 7, 16, 17, 200):
            x = random(draw, rows, k + 3)[:, :k]
            wanted = cpu.linear(x, wide)
            assert same_bits(cpu.linear(x, codes), wanted), (n, k, rows)
            if codes.rounds:
                assert same_bits(cpu.linear(x.bfloat16(), codes), wanted), (n, k, rows)
        torch.set_num_threads(2)
        assert same_bits(cpu.linear(x, codes), wanted)
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", CODE_KINDS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_every_code_has_its_factor(kernel_cache: Path, compute_dtype: ComputeDtype, kind: Kind) -> None:
    """A product with 1 in one column: all codes, in each column of a panel, with tiny and large scales."""
    cpu = operators("cpu", kernel_cache, compute_dtype)
    every = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8":
        every = every[every & 127 != 127]
    codes = torch.stack([every.roll(i) for i in range(33)])
    codes = codes.view({"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8))
    scales = torch.tensor([2.0**-90, 1 / 3, 2.0**90])[torch.arange(33) % 3][:, None]
    given = Stored(codes, kind, scales)
    eye = torch.eye(given.columns)
    assert same_bits(cpu.linear(eye, cpu.pack([given], None)).T, given.factors(compute_dtype).float() + 0.0)


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_parts_of_several_kinds_keep_their_codes(kernel_cache: Path, compute_dtype: ComputeDtype) -> None:
    cpu, draw = operators("cpu", kernel_cache, compute_dtype), torch.Generator().manual_seed(0)
    parts = [
        stored("int4", 40, 64, 32, shifted=False),
        stored("int4", 3, 64, 32, shifted=False),
        plain(random(draw, 5, 64).bfloat16()),
        stored("int8", 33, 64, 64, shifted=True),
    ]
    wide = [widened(part, compute_dtype) for part in parts]
    for bias in (None, random(draw, 81)):
        codes = cpu.pack(parts, bias)
        assert [part.out_features for part in codes.segments] == [43, 5, 33]
        for rows in (1, 20):
            x = random(draw, rows, 64)
            assert same_bits(cpu.linear(x, codes), cpu.linear(x, cpu.pack(wide, bias)))
            assert same_bits(cpu.logits(x, codes), cpu.linear(x, codes))
    down = cpu.pack([stored("int8", 9, 33, 33, shifted=False)], None)
    gate_up = [stored("int4", 33, 64, 32, shifted=False), stored("int8", 33, 64, 64, shifted=False)]
    wide = [widened(part, compute_dtype) for part in gate_up]
    inner, wanted = (cpu.linear_silu(x, cpu.pack(given, None), down) for given in (gate_up, wide))
    assert same_bits(cpu.linear(inner, down), cpu.linear(wanted, down))


def test_codes_beside_wide_weights_have_products_in_float32(half_cpu: Operators) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [stored("int8", 9, 64, 64, shifted=False), plain(random(draw, 5, 64))]
    packed, x = half_cpu.pack(parts, None), random(draw, 3, 64)
    assert not packed.rounds
    joined = torch.cat([part.factors("bfloat16").float() for part in parts])
    assert same_bits(half_cpu.linear(x, packed), half_cpu.linear(x, half_cpu.pack([plain(joined)], None)))


@pytest.mark.parametrize("inner", [30, 160])
@pytest.mark.parametrize("kind", CODE_KINDS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_gated_heads_and_experts_have_the_bits_of_widened_weights(
    kernel_cache: Path, compute_dtype: ComputeDtype, kind: Kind, inner: int
) -> None:
    cpu, draw = operators("cpu", kernel_cache, compute_dtype), torch.Generator().manual_seed(inner)
    gate_up, wide_gate_up = both(cpu, stored(kind, 2 * inner, 96, 32, shifted=True), compute_dtype)
    down, wide_down = both(cpu, stored(kind, 50, inner, inner, shifted=False), compute_dtype)
    heads = stack([stored(kind, 40, 96, 48, shifted=False, seed=seed) for seed in range(3)])
    into, back = (
        stack([stored(kind, rows, columns, columns // 2, shifted=False, seed=seed) for seed in range(4)])
        for rows, columns in ((2 * 32, 96), (96, 32))
    )
    pairs = [both(cpu, part, compute_dtype) for part in (heads, into, back)]
    for rows in (1, 17, 65):
        x = random(draw, rows, 96)
        hidden = cpu.linear_silu(x, gate_up, down)
        assert same_bits(hidden, cpu.linear_silu(x, wide_gate_up, wide_down))
        assert same_bits(cpu.linear(hidden, down), cpu.linear(hidden, wide_down))
        by_head = random(draw, rows, 3, 96)
        assert same_bits(*(cpu.linear_heads(by_head, packed) for packed in pairs[0]))
        chosen = torch.randint(-1, 4, (rows, 2), generator=draw, dtype=torch.int32)
        choice = Choice(chosen, random(draw, rows, 2))
        sums = [
            cpu.moe_outer(cpu.moe_inner(x, choice, experts), choice, experts, None, None)
            for experts in (Experts(pairs[1][i], pairs[2][i]) for i in range(2))
        ]
        assert same_bits(*sums)


def test_codes_take_their_own_memory_and_a_scale_for_each_group(cpu: Operators) -> None:
    packed = cpu.pack([stored("int4", 64, 128, 32, shifted=False)], None)
    assert packed.data.numel() == 64 * (128 // 2 + 4 * 128 // 32)
    packed = cpu.pack([stored("int8", 64, 128, 128, shifted=True)], None)
    assert packed.data.numel() == 64 * (128 + 4 * 2)


def test_codes_that_cannot_be_decoded_exactly_are_widened(half_cpu: Operators) -> None:
    good = stored("fp8", 8, 24, 12, shifted=False)
    assert is_kept(good)
    assert not is_kept(plain(torch.ones(1)))
    assert good.scales is not None
    denormal, infinite = good.scales.clone(), good.scales.clone()
    denormal[0, 1], infinite[7, 0] = 1e-39, torch.inf
    x = torch.ones(2, 24)
    for odd in (
        Stored(good.codes, "fp8", denormal),
        Stored(good.codes, "fp8", good.scales, infinite),
        stored("fp8", 8, 24, 6, shifted=False),
    ):
        assert not is_kept(odd)
        packed = half_cpu.pack([odd], None)
        assert packed.kind == "bfloat16"
        wanted = half_cpu.linear(x, half_cpu.pack([widened(odd, "bfloat16")], None))
        torch.testing.assert_close(half_cpu.linear(x, packed), wanted, rtol=0, atol=0, equal_nan=True)
