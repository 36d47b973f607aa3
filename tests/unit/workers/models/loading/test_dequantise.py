"""Quantised weights have the values that their formats define, in any part the same as in the whole."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.workers.quantised import CASES, NAME, Case, opened, packed, positive, whole_number, words
from tidemill.kernels.linear.stored import PIECE
from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.dequantise import unpacked
from tidemill.workers.models.loading.sharding import ByHeads, Cut, EvenRuns, Replicated, part_of


@pytest.mark.parametrize("make", CASES)
def test_values_are_those_of_the_format_rounded_once(
    tmp_path: Path, make: Callable[[torch.Generator], Case]
) -> None:
    for seed in range(5):
        case = make(torch.Generator().manual_seed(seed))
        checkpoint = opened(tmp_path, case)
        found = checkpoint.read(NAME, part_of(Replicated(), case.shape[0], 0, 1))
        assert found.kind == case.kind
        assert checkpoint.widened == ([NAME] if case.kind == "bfloat16" else [])
        planned = checkpoint.num_bytes(NAME, 2)
        assert case.kind == "bfloat16" or found.num_bytes <= planned <= found.num_bytes + 4 * found.columns
        assert torch.equal(found.widened.codes, case.wanted.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_of_8_bit_floats_has_its_value(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    config = packed({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized")

    def read(found: torch.Tensor) -> torch.Tensor:
        stored = {NAME: found.view(dtype), f"{NAME}_scale": torch.tensor([1.0])}
        case = Case(config, (16, 16), stored, found.view(dtype).float())
        return opened(tmp_path, case).read(NAME, part_of(Replicated(), 16, 0, 1)).widened.codes

    numbers = codes.masked_fill(codes.view(dtype).float().isnan(), 0)
    assert torch.equal(read(numbers), numbers.view(dtype).bfloat16())
    with pytest.raises(ModelError, match=f"{NAME} holds NaN"):
        read(codes)


@pytest.mark.parametrize("make", CASES)
def test_parts_of_all_ranks_are_the_whole(tmp_path: Path, make: Callable[[torch.Generator], Case]) -> None:
    """Compare the factors of products in float32: rounded to bfloat16, they are equal too."""
    case = make(torch.Generator().manual_seed(0))
    checkpoint = opened(tmp_path, case)
    whole = checkpoint.read(NAME, part_of(Replicated(), case.shape[0], 0, 1)).factors("float32").float()
    for dim, rows in enumerate(case.shape):
        cuts: list[Cut] = [EvenRuns(dim=dim), ByHeads(1, (rows,), dim)]
        cuts += [EvenRuns(runs=2, dim=dim), EvenRuns(dim=dim, step=2)] if rows % 2 == 0 else []
        for cut in cuts:
            for size in (1, 2, 3):
                for index in range(size):
                    part = part_of(cut, rows, index, size)
                    zeros = torch.zeros_like(whole).narrow(dim, 0, part.zeros)
                    pieces = [(whole.narrow(dim, start, end - start), zeros) for start, end in part.ranges]
                    wanted = torch.cat([block for piece in pieces for block in piece], dim)
                    found = checkpoint.read(NAME, part).factors("float32").float()
                    assert torch.equal(found, wanted), (cut, size, index)


def test_tensor_of_many_pieces(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, columns = 700, 1000
    assert rows * columns > 2 * PIECE
    weight = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    scale = positive(draw, 6, 8)
    wanted = weight.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    case = Case(config, (rows, columns), {NAME: weight, f"{NAME}_scale_inv": scale}, wanted)
    checkpoint = opened(tmp_path, case)
    assert torch.equal(
        checkpoint.read(NAME, part_of(Replicated(), rows, 0, 1)).widened.codes, wanted.bfloat16()
    )
    part = part_of(EvenRuns(), rows, 1, 4)
    assert torch.equal(checkpoint.read(NAME, part).widened.codes, wanted[slice(*part.ranges[0])].bfloat16())


@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 1 << 30))
def test_integers_are_unpacked_as_they_were_packed(rows: int, columns: int, bits: int, seed: int) -> None:
    values = whole_number(torch.Generator().manual_seed(seed), rows, columns, bits=bits)
    assert torch.equal(unpacked(words(values, bits), bits)[:, :columns].long() - (1 << bits - 1), values)
