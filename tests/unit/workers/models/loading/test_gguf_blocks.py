"""Blocks of GGUF files have exactly the values that llama.cpp's own library gives them."""

import sys

import gguf
import numpy as np
import pytest
import torch

from tidemill.workers.models.errors import ModelError
from tidemill.workers.models.loading.dequantise import cut
from tidemill.workers.models.loading.gguf_blocks import KINDS, stored_of
from tidemill.workers.models.loading.sharding import EvenRuns, part_of

ROWS, COLUMNS = 3, 512
WIDENED = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ2_S")


def blocks_of(kind: str) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """Return rows of random blocks, of which no number is infinite."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS // elements, num_bytes), dtype=np.uint8)
    blocks[blocks > 0xF0] = 0xF0
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", [*KINDS, *WIDENED])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_are_those_of_the_library(kind: str) -> None:
    blocks = blocks_of(kind)
    wanted = torch.tensor(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    found = stored_of(kind, torch.tensor(blocks), "name")
    assert found.columns == COLUMNS
    if kind in WIDENED:
        assert found.kind == "bfloat16"
        wanted = wanted.bfloat16()
    else:
        assert found.kind == KINDS[kind][1]
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 32, 64])
def test_columns_of_ranks_have_the_values_of_the_whole(kind: str, size: int) -> None:
    """Halves and quarters of a block stay codes; others are floats that products in float32 take."""
    whole = stored_of(kind, torch.tensor(blocks_of(kind)), "name")
    found = [cut(whole, part_of(EvenRuns(dim=1), COLUMNS, index, size)) for index in range(size)]
    assert all((part.scales is not None) == (size != 3) for part in found)
    columns = torch.cat([part.factors("float32") for part in found], 1)[:, :COLUMNS]
    torch.testing.assert_close(columns, whole.values, rtol=0, atol=0, equal_nan=True)


def test_kind_that_is_not_computed_with_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.tensor(blocks_of("Q2_K"))
    with pytest.raises(ModelError, match="tensor name is Q8_K: pip install"):
        stored_of("Q8_K", torch.zeros(1, 292, dtype=torch.uint8), "name")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"tensor name is Q2_K: pip install 'tidemill\[gguf\]' to widen"):
        stored_of("Q2_K", blocks, "name")
