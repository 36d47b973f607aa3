"""Weights as a folder stores them: what a code stands for, and rows that move and join as codes."""

import pytest
import torch

from tidemill.kernels.linear.stored import FOUR_BITS, Kind, Stored, join, plain, runs, stack

CODE_KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4", "uint4", "fp4")


def stored(kind: Kind, rows: int, columns: int, group: int, *, shifted: bool, seed: int = 0) -> Stored:
    """Random codes, scales and offsets."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    elif kind == "int8":
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
    assert torch.equal(join(parts).values, torch.cat([part.values for part in parts]))
