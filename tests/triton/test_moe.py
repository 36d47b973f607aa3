# pyrefly: ignore-errors[implicit-any-parameter]
# ruff: noqa: ANN001 - Triton takes annotations of kernels for its own types
"""`moe_inner` and `moe_outer` in Triton: parity, which pairs a tile holds, and what a token may depend on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.support.kernels.cases import int32, random, relative_error, same_bits, step
from tests.support.kernels.experts import (
    CASES,
    Case,
    check,
    check_any_batch,
    check_ranks,
    choose,
    layer_of,
    moe,
)
from tests.unit.kernels.test_stored import CODE_KINDS, stored
from tidemill.kernels.dispatch import REFERENCE, operators
from tidemill.kernels.linear.cuda import pack
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.reference import pack as reference_pack
from tidemill.kernels.linear.stored import Kind
from tidemill.kernels.moe import reference
from tidemill.kernels.moe.cuda import moe_inner, moe_outer, moe_outer_norm, route, tiles
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.order import is_few, order_of, tile_of
from tidemill.kernels.moe.routing import Choice, Routing
from tidemill.kernels.moe.tiles import tiles_for

OURS = operators("triton", Path())


def packed(weight: torch.Tensor) -> Packed:
    return Packed(weight, None, weight.shape[-2], weight.shape[-1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_moe_matches_the_definition(case: Case) -> None:
    check(case, OURS)


CODES = {
    f"{kind} of {tokens} tokens": (kind, tokens) for kind in (*CODE_KINDS, "w8a8") for tokens in (5, 150)
}


def check_codes(kind: Kind, tokens: int, device: str = "cpu") -> None:
    """Against the definition, with biases: a few tokens, and tiles of 64."""
    experts, width, inner, group = 3, 160, 96, 16 if tokens == 5 else 32
    draw = torch.Generator().manual_seed(tokens)
    found, wide = list[Packed](), list[Packed]()
    for out, depth in ((2 * inner, width), (width, inner)):
        part = stored(
            kind, experts * out, depth, depth if kind in {"int8", "w8a8"} else group, shifted=kind == "uint4"
        )
        part = part.moved(lambda rows, out=out: rows.view(experts, out, -1))
        assert part.scales is not None
        part = replace(part, scales=part.scales / 256)
        bias = random(draw, experts, out).bfloat16()
        found.append(pack([part.moved(lambda rows: rows.to(device))], bias.to(device)))
        wide.append(reference_pack([part], bias, "bfloat16"))
        assert found[-1].kind == kind
    ours, truth = Experts(found[0], found[1]), Experts(wide[0], wide[1])
    x_TH, logits_TE = random(draw, tokens, width).bfloat16(), random(draw, tokens, experts).argsort(-1) / 8
    routing = Routing(2, renormalise=True)
    choice, wanted = route(logits_TE.to(device), routing), reference.route(logits_TE.double(), routing)
    hidden = moe_inner(x_TH.to(device), choice, ours)
    wide_hidden = reference.moe_inner(x_TH.double(), wanted, truth)
    y, wide_TH = (
        moe_outer(hidden, choice, ours, None, None),
        reference.moe_outer(wide_hidden, wanted, truth, None, None),
    )
    assert hidden.dtype == y.dtype == torch.bfloat16
    assert relative_error(hidden.cpu(), wide_hidden) < 1e-2
    assert relative_error(y.cpu(), wide_TH) < 1e-2


@pytest.mark.parametrize(("kind", "tokens"), CODES.values(), ids=CODES)
def test_codes_match_the_definition(kind: Kind, tokens: int) -> None:
    check_codes(kind, tokens)


@triton.jit
def show_tile(
    chosen, order, starts, pairs, shown, E: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr
) -> None:  # fmt: skip
    expert, pair_M = tile_of(chosen, order, starts, pairs, E, M, AT_ONCE)
    shown += tl.program_id(0) * (M + 1)
    tl.store(shown, expert)
    tl.store(shown + 1 + tl.arange(0, M), pair_M)


@pytest.mark.parametrize("how", ["random", "skewed", "padded"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 9, 4), (40, 50, 1), (17, 40, 2), (130, 9, 1), (90, 3, 3), (513, 3, 1), (450, 11, 10)],
)
def test_every_pair_is_in_one_tile_of_its_expert(tokens: int, experts: int, top_k: int, how: str) -> None:
    """The number of tiles is computed from shapes. With more or fewer a grid would miss some."""
    draw = torch.Generator().manual_seed(tokens)
    chosen_TK = random(draw, tokens, experts).argsort(-1)[:, :top_k].sort(-1).values.int()
    if how == "skewed":
        chosen_TK = torch.arange(experts - top_k, experts).expand(tokens, top_k).contiguous().int()
    if how == "padded":
        chosen_TK[tokens // 2 :] = -1
    pairs = tokens * top_k
    few = is_few(pairs, experts, tiles_for(pairs, experts).tokens)
    order = None if few else order_of(chosen_TK, experts)
    row, count, found = tiles(Choice(chosen_TK, chosen_TK, order), experts)
    assert row == tiles_for(pairs, experts)
    m = row.tokens
    shown = chosen_TK.new_empty(count, 1 + m)
    show: Any = show_tile  # Triton has no types
    show[(count,)](*found, shown, E=experts, M=m, AT_ONCE=16)
    kept = [
        (expert, [pair for pair in pair_M if pair >= 0], pair_M)
        for expert, *pair_M in shown.tolist()
        if expert >= 0
    ]
    flat = chosen_TK.flatten().tolist()
    for expert, own, pair_M in kept:
        assert own
        assert own == pair_M[: len(own)], "pairs come first"
        assert {flat[pair] for pair in own} == {expert}
    for expert in range(experts):
        in_order = [pair for e, own, _ in kept if e == expert for pair in own]
        assert in_order == [pair for pair, e in enumerate(flat) if e == expert]
        assert sum(e == expert for e, *_ in kept) == -(-len(in_order) // m), "weights are read once a tile"


def test_shared_expert_among_the_others_and_padding_without_any() -> None:
    """Against the definition, with rows of which some are the padding of a batch."""
    layer, draw = layer_of(9, 6, 32, 16), torch.Generator().manual_seed(3)
    wide = layer.to(torch.float64)
    rows = step([2, 1, 3, 3], before=[4, 5, 0, 0])
    rows = replace(rows, lens_B=rows.lens_B * int32([1, 0, 0, 1]))
    padding = [2, 3, 4, 5]
    for shared, gated, each in ((2, True, rows), (1, False, None), (1, True, rows)):
        routing = Routing(3, renormalise=True, scale=2.0, shared=shared, gated=gated)
        logits_TE = layer.logits_TE[:, : 6 - shared + gated]
        choice, wanted = (route_of(logits, routing, each) for route_of, logits in (
            (route, logits_TE), (reference.route, logits_TE.double()))
        )  # fmt: skip
        assert torch.equal(choice.experts_TK, wanted.experts_TK)
        assert relative_error(choice.weights_TK, wanted.weights_TK) < 1e-5
        hidden = moe_inner(layer.x_TH, choice, layer.experts(OURS))
        residual_TH, norm_H = random(draw, 9, 32), random(draw, 32)
        found = moe_outer_norm(
            hidden, choice, layer.experts(OURS), None, None, residual_TH.clone(), norm_H, 1e-6
        )
        hidden = reference.moe_inner(wide.x_TH, wanted, wide.experts(REFERENCE))
        truth = reference.moe_outer_norm(
            hidden, wanted, wide.experts(REFERENCE), None, None, residual_TH.double(), norm_H.double(), 1e-6
        )
        assert all(relative_error(ours, true) < 1e-5 for ours, true in zip(found, truth, strict=True))
        if each is not None:
            assert torch.equal(found[0][padding], residual_TH[padding]), "padding has no expert"


def test_token_has_the_same_bits_in_any_batch() -> None:
    check_any_batch(OURS, layer_of(12, 6, 48, 24))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf / inf
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poisoned_token_harms_no_other(poison: float) -> None:
    """The padding of a batch may be anything: it must find experts that exist."""
    layer = layer_of(4, 6, 32, 16)
    wanted = moe(OURS, layer, 3)
    layer.x_TH[2], layer.logits_TE[2] = poison, poison
    others = [0, 1, 3]
    assert same_bits(moe(OURS, layer, 3)[others], wanted[others])


def test_ranks_compute_their_columns() -> None:
    """Slices of gate, up and down; hidden goes from rank to rank in between."""
    layer = layer_of(5, 4, 64, 48)
    wanted = moe(OURS, layer, 2)
    gate, up = layer.gate_up.chunk(2, dim=1)
    halves = [
        Experts(
            packed(torch.cat([gate[:, i : i + 24], up[:, i : i + 24]], dim=1)),
            packed(layer.down[:, j : j + 32].contiguous()),
        )
        for i, j in ((0, 0), (24, 32))
    ]
    choice = choose(OURS, layer, 2)
    hidden_TKI = torch.cat([moe_inner(layer.x_TH, choice, half) for half in halves], dim=-1)
    outer = [moe_outer(hidden_TKI, choice, half, None, None) for half in halves]
    y_TH = torch.cat(outer, dim=-1)
    assert relative_error(y_TH, wanted) < 1e-6


def test_rows_may_be_slices_of_wider_ones() -> None:
    layer = layer_of(3, 4, 32, 16)
    wide_TH, wide_TE = torch.full((3, 64), torch.nan), torch.full((3, 9), torch.nan)
    wide_TH[:, 16:48], wide_TE[:, 1:5] = layer.x_TH, layer.logits_TE
    sliced = replace(layer, x_TH=wide_TH[:, 16:48], logits_TE=wide_TE[:, 1:5])
    assert same_bits(moe(OURS, sliced, 2), moe(OURS, layer, 2))


def test_no_tokens_are_no_launch() -> None:
    layer = layer_of(0, 4, 8, 8)
    assert moe(OURS, layer, 2).shape == (0, 8)


def test_hidden_of_another_width_than_down_is_refused() -> None:
    """A rank that forgot to gather would read beyond its rows."""
    layer = layer_of(3, 5, 8, 8)
    local = replace(layer, gate_up=layer.gate_up[:, 4:12].contiguous())
    with pytest.raises(AssertionError):
        moe(OURS, local, 2)


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_of_ranks_add_up(tokens: int) -> None:
    """Each rank runs its own experts: few pairs, which tiles search, and many, which are sorted again."""
    check_ranks(OURS, layer_of(tokens, 6, 40, 24), 3)
