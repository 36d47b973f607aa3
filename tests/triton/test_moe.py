# pyright: basic
"""`moe_inner` and `moe_outer` in Triton: parity, which pairs a tile holds, and what a token may depend on."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from tests.support.kernels.cases import random, relative_error, same_bits
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.moe import reference
from tidemill.kernels.moe.cuda import moe_inner, moe_outer, route, tile_tokens, tiles_of
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Layer:
    x_TH: torch.Tensor
    logits_TE: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor

    def experts(self, activation: Literal["silu", "clamped"] | None = None) -> Experts:
        """Return experts without biases, or with them where an activation is named."""
        if activation is None:
            return Experts(packed(self.gate_up), packed(self.down))
        gate_up, down = packed(self.gate_up, self.gate_up_bias), packed(self.down, self.down_bias)
        return Experts(gate_up, down, activation, limit=1.5)

    def double(self) -> "Layer":
        return Layer(*(getattr(self, name).double() for name in self.__dataclass_fields__))

    def on(self, device: str) -> "Layer":
        return Layer(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def rows(self, rows: list[int]) -> "Layer":
        return replace(self, x_TH=self.x_TH[rows], logits_TE=self.logits_TE[rows])


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    return Packed(weight, bias, weight.shape[-2], weight.shape[-1])


def layer_of(
    tokens: int, experts: int, width: int, inner: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Layer:
    """Logits that differ within a token, in bfloat16 too: a tie has no definition."""
    draw = torch.Generator().manual_seed(seed)
    logits_TE = random(draw, tokens, experts).argsort(-1) / 8
    x_TH = random(draw, tokens, width)
    gate_up = random(draw, experts, 2 * inner, width) / width**0.5
    down = random(draw, experts, width, inner) / inner**0.5
    biases = random(draw, experts, 2 * inner), random(draw, experts, width)
    return Layer(*(part.to(dtype) for part in (x_TH, logits_TE, gate_up, down, *biases)))


def moe(layer: Layer, top_k: int, experts: Experts | None = None) -> torch.Tensor:
    experts = experts or layer.experts()
    chosen_TK, weights_TK = route(layer.logits_TE, Routing(top_k, renormalise=True))
    hidden_TKI = moe_inner(layer.x_TH, chosen_TK, experts)
    return moe_outer(hidden_TKI, chosen_TK, weights_TK, experts, None, None)


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int
    experts: int
    top_k: int
    width: int
    inner: int
    dtype: torch.dtype = torch.float32
    activation: Literal["silu", "clamped"] | None = None


ACTIVATIONS: dict[int, Literal["silu", "clamped"]] = {2: "silu", 20: "clamped"}
"""The activations with biases, by tokens."""
SIZES = (  # tokens, experts, top k, width, inner; among them every size of a tile
    (1, 1, 1, 1, 1),
    (2, 12, 10, 34, 65),
    (20, 7, 3, 63, 17),
    (63, 3, 2, 64, 50),
    (65, 2, 2, 70, 33),
)
CASES = {
    f"{dtype} {tokens}x{width} {top_k} of {experts}x{inner}": Case(
        tokens=tokens, experts=experts, top_k=top_k, width=width, inner=inner, dtype=dtype,
        activation=ACTIVATIONS.get(tokens),
    )
    for dtype in TOLERANCES
    for tokens, experts, top_k, width, inner in SIZES
}  # fmt: skip


def check(case: Case, device: str = "cpu") -> None:
    """Against the definition in float64, on the host; with and without an expert for all, and its gate."""
    layer = layer_of(case.tokens, case.experts, case.width, case.inner, case.dtype)
    wide, ours = layer.double(), layer.on(device)
    experts, truth = ours.experts(case.activation), wide.experts(case.activation)
    routing = Routing(case.top_k, renormalise=case.tokens != 20)
    chosen, weights = route(ours.logits_TE, routing)
    wanted = reference.route(wide.logits_TE, routing)
    assert torch.equal(chosen.cpu(), wanted[0])
    assert chosen.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert relative_error(weights.cpu(), wanted[1]) < 1e-5
    hidden = moe_inner(ours.x_TH, chosen, experts)
    wide_hidden = reference.moe_inner(wide.x_TH, wanted[0], truth)
    assert hidden.dtype == case.dtype
    assert relative_error(hidden.cpu(), wide_hidden) < TOLERANCES[case.dtype]
    draw = torch.Generator().manual_seed(1)
    shared_TH = random(draw, case.tokens, case.width).to(case.dtype)
    gate_T1 = 3 * random(draw, case.tokens, 3)[:, 1:2]
    for parts in ((None, None), (shared_TH, None), (shared_TH, gate_T1)):
        given = (part if part is None else part.to(device) for part in parts)
        y = moe_outer(hidden, chosen, weights, experts, *given)
        assert y.dtype == case.dtype
        wide_parts = (part if part is None else part.double() for part in parts)
        truth_TH = reference.moe_outer(wide_hidden, *wanted, truth, *wide_parts)
        assert relative_error(y.cpu(), truth_TH) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_moe_matches_the_definition(case: Case) -> None:
    check(case)


def test_x_may_be_wider_than_the_weights() -> None:
    """The output has the dtype of the weights."""
    layer = layer_of(9, 4, 40, 20, torch.bfloat16)
    x_TH, logits_TE = random(torch.Generator().manual_seed(1), 9, 40), layer.logits_TE.float()
    mixed = replace(layer, x_TH=x_TH, logits_TE=logits_TE)
    wide = mixed.double()
    y_TH = moe(mixed, 2)
    assert y_TH.dtype == torch.bfloat16
    chosen = reference.route(wide.logits_TE, Routing(2, renormalise=True))
    hidden_TKI = reference.moe_inner(wide.x_TH, chosen[0], wide.experts())
    wanted_TH = reference.moe_outer(hidden_TKI, *chosen, wide.experts(), None, None)
    assert relative_error(y_TH, wanted_TH) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 9, 4), (40, 50, 1), (130, 9, 1), (90, 3, 3)])
def test_every_pair_is_in_one_tile_of_its_expert(
    tokens: int, experts: int, top_k: int, *, skewed: bool
) -> None:
    """The number of tiles is computed from shapes. With more or fewer a grid would miss some."""
    draw = torch.Generator().manual_seed(tokens)
    chosen_TK = random(draw, tokens, experts).argsort(-1)[:, :top_k].sort(-1).values.int()
    if skewed:
        chosen_TK = torch.arange(experts - top_k, experts).expand(tokens, top_k).contiguous().int()
    tile_expert, tile_pair, m = tiles_of(chosen_TK, experts)
    assert m == tile_tokens(tokens * top_k, experts)
    found: list[int] = []
    last = -1
    for expert, pair_M in zip(tile_expert.tolist(), tile_pair.tolist(), strict=True):
        if expert < 0:
            continue
        pairs = [pair for pair in pair_M if pair >= 0]
        assert pairs == pair_M[: len(pairs)], "pairs come first"
        assert pairs == sorted(pairs)
        assert pairs
        assert expert >= last
        assert {int(chosen_TK.flatten()[pair]) for pair in pairs} == {expert}
        found += pairs
        last = expert
    assert sorted(found) == list(range(tokens * top_k))
    counts = torch.bincount(chosen_TK.flatten().long(), minlength=experts)
    assert int((tile_expert >= 0).sum()) == int((-(-counts // m)).sum()), "weights are read once a tile"


def test_token_has_the_same_bits_in_any_batch() -> None:
    layer = layer_of(12, 6, 48, 24)
    whole = moe(layer, 3)
    for rows in ([0], [11, 5, 7], list(range(11, -1, -1))):
        assert same_bits(moe(layer.rows(rows), 3), whole[rows])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf / inf
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poisoned_token_harms_no_other(poison: float) -> None:
    """The padding of a batch may be anything: it must find experts that exist."""
    layer = layer_of(4, 6, 32, 16)
    wanted = moe(layer, 3)
    layer.x_TH[2], layer.logits_TE[2] = poison, poison
    others = [0, 1, 3]
    assert same_bits(moe(layer, 3)[others], wanted[others])


def test_ranks_compute_their_columns() -> None:
    """Slices of gate, up and down; hidden goes from rank to rank in between."""
    layer = layer_of(5, 4, 64, 48)
    wanted = moe(layer, 2)
    gate, up = layer.gate_up.chunk(2, dim=1)
    halves = [
        Experts(
            packed(torch.cat([gate[:, i : i + 24], up[:, i : i + 24]], dim=1)),
            packed(layer.down[:, j : j + 32].contiguous()),
        )
        for i, j in ((0, 0), (24, 32))
    ]
    chosen_TK, weights_TK = route(layer.logits_TE, Routing(2, renormalise=True))
    hidden_TKI = torch.cat([moe_inner(layer.x_TH, chosen_TK, half) for half in halves], dim=-1)
    outer = [moe_outer(hidden_TKI, chosen_TK, weights_TK, half, None, None) for half in halves]
    y_TH = torch.cat(outer, dim=-1)
    assert relative_error(y_TH, wanted) < 1e-6


def test_rows_may_be_slices_of_wider_ones() -> None:
    layer = layer_of(3, 4, 32, 16)
    wide_TH, wide_TE = torch.full((3, 64), torch.nan), torch.full((3, 9), torch.nan)
    wide_TH[:, 16:48], wide_TE[:, 1:5] = layer.x_TH, layer.logits_TE
    sliced = replace(layer, x_TH=wide_TH[:, 16:48], logits_TE=wide_TE[:, 1:5])
    assert same_bits(moe(sliced, 2), moe(layer, 2))


def test_no_tokens_are_no_launch() -> None:
    layer = layer_of(0, 4, 8, 8)
    assert moe(layer, 2).shape == (0, 8)


def test_hidden_of_another_width_than_down_is_refused() -> None:
    """A rank that forgot to gather would read beyond its rows."""
    layer = layer_of(3, 5, 8, 8)
    local = replace(layer, gate_up=layer.gate_up[:, 4:12].contiguous())
    with pytest.raises(AssertionError):
        moe(local, 2)
