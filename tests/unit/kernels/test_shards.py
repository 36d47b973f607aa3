"""A rank's share of an operator is a slice of the whole, bit for bit: tensor parallelism only concatenates.

Cuts are uneven on purpose, and widths no multiple of a vector or of a panel.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.cases import random, same_bits, shuffled_pages, step
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.mamba2.heads import Heads as Mamba2Heads
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing

EPSILON = 1e-6
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


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_linear_of_a_whole_with_threads_and_shards_without(cpu: Operators, rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = random(draw, rows, 1100), random(draw, 1003, 1100)
    torch.set_num_threads(2)
    whole = cpu.linear(x, cpu.pack([plain(weight)], None))
    torch.set_num_threads(1)
    ends = itertools.pairwise([0, 250, 501, 518, 1003])
    found = [cpu.linear(x, cpu.pack([plain(weight[start:end])], None)) for start, end in ends]
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
    lens = [a + b for a, b in zip(first, second, strict=True)]
    draw = torch.Generator().manual_seed(heads.dim)
    pages = shuffled_pages(lens, page_tokens, draw)
    tokens, dim = sum(lens), heads.dim
    q, k, v = (random(draw, tokens, n, dim) for n in (heads.q_heads, heads.kv_heads, heads.kv_heads))
    q_weight, k_weight, angles = random(draw, dim), random(draw, dim), random(draw, tokens, 2, dim // 4)

    def run(q_heads: slice, kv_heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        count = kv_heads.stop - kv_heads.start
        cache = torch.full((1 + int(pages.max()), count, 2, page_tokens, dim), torch.nan, dtype=dtype)
        found: list[torch.Tensor] = []
        for new, before, span in (
            (first, [0] * 4, slice(0, sum(first))),
            (second, first, slice(sum(first), None)),
        ):
            rows = step(new, before, pages)
            # Packed by rank, as the columns of its own projection are.
            mine = q[span, q_heads], k[span, kv_heads].contiguous(), v[span, kv_heads].contiguous()
            rotated = cpu.rope_store(*mine, q_weight, k_weight, EPSILON, angles[span], cache, rows)
            found += [rotated, cpu.attention(rotated, cache, rows, None, None)]
        return torch.cat(found), cache

    whole, cache = run(slice(0, heads.q_heads), slice(0, heads.kv_heads))
    for q_heads, kv_heads in heads.shares:
        found, own = run(q_heads, kv_heads)
        assert same_bits(found, whole[:, q_heads])
        assert same_bits(own, cache[:, kv_heads])


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    ranks=st.sampled_from(RANKS),
    sizes=st.sampled_from([(4, 1, 16, 16), (5, 2, 24, 33), (6, 3, 63, 65), (7, 4, 5, 127)]),
)
def test_states_by_groups_of_a_key_head(
    cpu: Operators, data: st.DataObject, ranks: int, sizes: tuple[int, int, int, int]
) -> None:
    """Convolution, delta rule and gated norm one after the other, and the states that they keep."""
    groups, heads, key_dim, value_dim = sizes
    lengths, slots, width = [3, 1, 17], 8, 4
    draw = torch.Generator().manual_seed(groups)
    channels, tokens = 2 * key_dim + heads * value_dim, sum(lengths)
    qkvz = random(draw, tokens, groups, channels + heads * value_dim)
    weight, bias = random(draw, width, groups, channels), random(draw, groups, channels)
    gates = random(draw, tokens, groups, 2 * heads)
    a_log, dt_bias, norm = random(draw, groups, heads), random(draw, groups, heads), random(draw, value_dim)
    window, temporal = (
        random(draw, slots, groups, width - 1, channels),
        torch.full((slots, groups, heads, key_dim, value_dim), torch.nan),
    )
    temporal[:3] = random(draw, *temporal[:3].shape)
    rows = step(lengths, read=[0, -1, 2], writes=[[3, -1, 0], [-1, -1, 1], [4, 5, 6]])

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = qkvz[:, part].contiguous()
        conv, state = window[:, part].clone(), temporal[:, part].clone()
        mixed = cpu.causal_conv(
            own[..., :channels], weight[:, part].contiguous(), bias[part].contiguous(), conv, rows
        )
        gates_TI, a_log_H, dt_bias_H = (
            gates[:, part].flatten(1),
            a_log[part].flatten(),
            dt_bias[part].flatten(),
        )
        o_TGRV = cpu.gated_delta(mixed, gates_TI, a_log_H, dt_bias_H, state, rows)
        y_TI = cpu.rms_norm_gated(o_TGRV, own[..., channels:].view(o_TGRV.shape), norm, EPSILON)
        return y_TI.view(o_TGRV.shape), conv, state

    whole = run(slice(0, groups))
    for part in data.draw(cuts(groups, ranks)):
        for found, wanted in zip(run(part), whole, strict=True):
            assert same_bits(found, wanted[:, part])


@settings(max_examples=20, deadline=None)
@given(data=st.data(), ranks=st.sampled_from(RANKS), sizes=st.sampled_from([(4, 1, 16, 16), (6, 3, 63, 65)]))
def test_states_of_mamba2_by_head_groups(
    cpu: Operators, data: st.DataObject, ranks: int, sizes: tuple[int, int, int, int]
) -> None:
    groups, heads, key_dim, value_dim = sizes
    lengths, slots = [3, 1, 17], 8
    draw, tokens = torch.Generator().manual_seed(groups), sum(lengths)
    mixed = random(draw, tokens, groups, 2 * key_dim + heads * value_dim)
    z, dt = random(draw, tokens, groups, heads, value_dim), random(draw, tokens, groups, heads)
    a_log, dt_bias, skip = random(draw, 3, groups, heads)
    temporal = torch.full((slots, groups, heads, key_dim, value_dim), torch.nan)
    temporal[:3] = random(draw, *temporal[:3].shape)
    rows = step(lengths, read=[0, -1, 2], writes=[[3, -1, 0], [-1, -1, 1], [4, 5, 6]])

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        own = Mamba2Heads(*(x[part].flatten() for x in (a_log, dt_bias, skip)), dt_min=0.1, dt_max=1.5)
        state = temporal[:, part].clone()
        dt_TH = dt[:, part].flatten(1)
        return cpu.mamba2(mixed[:, part].contiguous(), z[:, part], dt_TH, own, state, rows), state

    whole = run(slice(0, groups))
    for part in data.draw(cuts(groups, ranks)):
        for found, wanted in zip(run(part), whole, strict=True):
            assert same_bits(found, wanted[:, part])


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    ranks=st.sampled_from(RANKS),
    tokens=st.sampled_from([1, 2, 17]),
    inner=st.integers(4, 90),
    width=st.integers(4, 90),
)
def test_experts_by_inner_columns_and_then_by_output_rows(
    cpu: Operators, data: st.DataObject, ranks: int, tokens: int, inner: int, width: int
) -> None:
    draw = torch.Generator().manual_seed(inner)
    x, logits = random(draw, tokens, width), random(draw, tokens, 9)
    gate, up, down = (
        random(draw, 9, inner, width),
        random(draw, 9, inner, width),
        random(draw, 9, width, inner),
    )
    gate_bias, up_bias, down_bias = random(draw, 9, inner), random(draw, 9, inner), random(draw, 9, width)
    into = cpu.pack([plain(torch.cat([gate, up], dim=1))], torch.cat([gate_bias, up_bias], dim=1))
    whole = Experts(into, cpu.pack([plain(down)], down_bias), "clamped")
    choice = cpu.route(logits, Routing(4, renormalise=True))
    hidden = cpu.moe_inner(x, choice, whole)
    gathered: list[torch.Tensor] = []
    for part in data.draw(cuts(inner, ranks)):
        biases = torch.cat([gate_bias[:, part], up_bias[:, part]], dim=1)
        gate_up = cpu.pack([plain(torch.cat([gate[:, part], up[:, part]], dim=1))], biases)
        gathered.append(cpu.moe_inner(x, choice, replace(whole, gate_up=gate_up)))
    assert same_bits(torch.cat(gathered, dim=2), hidden)
    wanted = cpu.moe_outer(hidden, choice, whole, None, None)
    found: list[torch.Tensor] = []
    for part in data.draw(cuts(width, ranks)):
        own = replace(whole, down=cpu.pack([plain(down[:, part])], down_bias[:, part]))
        found.append(cpu.moe_outer(hidden, choice, own, None, None))
    assert same_bits(torch.cat(found, dim=1), wanted)


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(), ranks=st.sampled_from(RANKS), tokens=st.sampled_from([1, 2, 17]), width=st.integers(4, 90)
)
def test_activations_by_columns_and_by_heads(
    cpu: Operators, data: st.DataObject, ranks: int, tokens: int, width: int
) -> None:
    draw = torch.Generator().manual_seed(width)
    gate, up = 20 * random(draw, tokens, width), random(draw, tokens, width)
    whole = cpu.silu_mul(torch.cat([gate, up], dim=1))
    parts = data.draw(cuts(width, ranks))
    found = [cpu.silu_mul(torch.cat([gate[:, part], up[:, part]], dim=1)) for part in parts]
    assert same_bits(torch.cat(found, dim=1), whole)
    x_THD, gate_THD = random(draw, tokens, 7, width), 20 * random(draw, tokens, 7, width)
    whole = cpu.sigmoid_mul(x_THD, gate_THD)
    heads = data.draw(cuts(7, ranks))
    found = [cpu.sigmoid_mul(x_THD[:, part].contiguous(), gate_THD[:, part]) for part in heads]
    assert same_bits(torch.cat(found, dim=1), whole)


@pytest.mark.parametrize("shares", [((0, 3), (3, 6)), ((0, 2), (2, 4), (4, 6))], ids=str)
def test_queries_of_latents_by_heads(cpu: Operators, shares: tuple[tuple[int, int], ...]) -> None:
    """Every rank stores the same latents, and takes its own heads into their space and out of it."""
    tokens, heads, width, rotary = 70, 6, 40, 8
    draw = torch.Generator().manual_seed(3)
    pages = shuffled_pages([tokens], 16, draw)
    q, k, angles = random(draw, tokens, heads, 20), random(draw, tokens, 1, width), random(draw, tokens, 2, 4)
    absorb, release = random(draw, heads, width - rotary, 12), random(draw, heads, 10, width - rotary)

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.full((1 + int(pages.max()), 1, 1, 16, width), torch.nan)
        rows = step([tokens], [0], pages)
        own = q[:, part]
        inside = cpu.linear_heads(own[..., rotary:], cpu.pack([plain(absorb[part])], None))
        whole = torch.cat([own[..., :rotary], inside], dim=-1)
        rotated = cpu.rope_store(whole, k, None, None, None, EPSILON, angles, cache, rows)
        found = cpu.attention(rotated, cache, rows, None, None)
        return cpu.linear_heads(found[..., rotary:], cpu.pack([plain(release[part])], None)), cache

    wanted, latents = run(slice(0, heads))
    for start, end in shares:
        found, cache = run(slice(start, end))
        assert same_bits(found, wanted[:, start:end])
        assert same_bits(cache, latents)
