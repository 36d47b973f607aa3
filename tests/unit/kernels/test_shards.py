"""A rank's share of an operator is a slice of the whole, bit for bit: tensor parallelism only concatenates.

Cuts are uneven on purpose, and widths no multiple of a vector or of a panel.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.cases import random, same_bits
from tests.support.kernels.paged import EPSILON, Case, Layer, Storing
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.stored import plain

RANKS = (2, 3, 4)


@st.composite
def cuts(draw: st.DrawFn, total: int, ranks: int) -> list[slice]:
    """`[0, total)` in `ranks` parts, none of them empty."""
    inner = draw(st.sets(st.integers(1, total - 1), min_size=ranks - 1, max_size=ranks - 1))
    ends = [0, *sorted(inner), total]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    ranks=st.sampled_from(RANKS),
    rows=st.sampled_from([1, 2, 17, 200]),
    out=st.integers(4, 300),
    width=st.sampled_from([1, 5, 63, 64, 257, 600]),
    biased=st.booleans(),
)
def test_linear_by_output_rows_of_the_weight(
    cpu: Operators, data: st.DataObject, ranks: int, rows: int, out: int, width: int, *, biased: bool
) -> None:
    draw = torch.Generator().manual_seed(out)
    x, weight, bias = random(draw, rows, width), random(draw, out, width), random(draw, out)
    whole = cpu.linear(x, cpu.pack([plain(weight)], bias if biased else None))
    parts = data.draw(cuts(out, ranks))
    found = [cpu.linear(x, cpu.pack([plain(weight[part])], bias[part] if biased else None)) for part in parts]
    assert same_bits(torch.cat(found, dim=1), whole)


@dataclass(frozen=True)
class Heads:
    """`shares`: the query heads and the kv heads of each rank."""

    q_heads: int
    kv_heads: int
    dim: int
    shares: tuple[tuple[slice, slice], ...]


ATTENTION = (
    # kv heads divided, evenly and not
    Heads(8, 4, 16, ((slice(0, 4), slice(0, 2)), (slice(4, 8), slice(2, 4)))),
    Heads(15, 5, 63, ((slice(0, 6), slice(0, 2)), (slice(6, 9), slice(2, 3)), (slice(9, 15), slice(3, 5)))),
    # one kv head on several ranks, its query heads divided, evenly and not
    Heads(8, 2, 65, tuple((slice(2 * r, 2 * r + 2), slice(r // 2, r // 2 + 1)) for r in range(4))),
    Heads(5, 1, 40, ((slice(0, 1), slice(0, 1)), (slice(1, 5), slice(0, 1)))),
    Heads(
        200,
        2,
        16,
        ((slice(0, 100), slice(0, 1)), (slice(100, 133), slice(1, 2)), (slice(133, 200), slice(1, 2))),
    ),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("heads", ATTENTION, ids=str)
def test_attention_and_rope_store_by_heads(
    cpu: Operators, heads: Heads, page_tokens: int, dtype: torch.dtype
) -> None:
    """A prefill of mixed lengths, then decode and replay; each rank has pages of its own."""
    first, second = [65, 1, 130, 2], [1, 1, 5, 63]
    for new, before in ((first, [0] * 4), (second, first)):
        case = Case(
            new=new, before=before, page_tokens=page_tokens, heads=(heads.q_heads, heads.kv_heads),
            dim=heads.dim, rotary=2 * (heads.dim // 4), dtype=torch.float32, cache_dtype=dtype,
        )  # fmt: skip
        layer, storing = Layer(case), Storing(case)
        whole, turned = layer.run(cpu), storing.run(cpu)
        assert storing.v_TKD is not None
        for q_heads, kv_heads in heads.shares:
            q_THD, own = layer.q_THD[:, q_heads].contiguous(), layer.cache[:, kv_heads].contiguous()
            assert same_bits(cpu.attention(q_THD, own, layer.rows, None, None), whole[:, q_heads])
            # Packed by rank, as the columns of its own projection are.
            k, v = storing.k_TKD[:, kv_heads].contiguous(), storing.v_TKD[:, kv_heads].contiguous()
            pages = torch.full_like(own, torch.nan)
            rest: Any = (*storing.weights, EPSILON, storing.angles_T2R, pages, storing.rows)
            assert same_bits(cpu.rope_store(storing.q_THD[:, q_heads], k, v, *rest), turned[:, q_heads])
            assert same_bits(pages, storing.arena[:, kv_heads, 1])
