"""`moe_inner` and `moe_outer` against their definitions; a token's sum is the same in any batch."""

from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.cases import random, relative_error, same_bits
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.moe.experts import Experts


class Layer:
    def __init__(self, tokens: int, experts: int, width: int, inner: int) -> None:
        draw = torch.Generator().manual_seed(experts)
        self.x_TH, self.logits_TE = random(draw, tokens, width), 2 * random(draw, tokens, experts)
        self.gate_up, self.down = random(draw, experts, 2 * inner, width), random(draw, experts, width, inner)

    def experts(
        self, ops: Operators, top_k: int, *, renormalise: bool = True, dtype: torch.dtype = torch.float32
    ) -> Experts:
        gate_up, down = (ops.pack(weight.to(dtype), None) for weight in (self.gate_up, self.down))
        return Experts(gate_up, down, top_k, renormalise)


def moe(ops: Operators, x_TH: torch.Tensor, logits_TE: torch.Tensor, experts: Experts) -> torch.Tensor:
    return ops.moe_outer(*ops.moe_inner(x_TH, logits_TE, experts), experts, None, None)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "width", "inner"),
    [(1, 1, 1, 1, 1), (65, 7, 3, 63, 17), (2, 64, 10, 64, 65), (127, 4, 4, 30, 33)],
)
def test_matches_the_definition(
    cpu: Operators,
    reference: Operators,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    inner: int,
    renormalise: bool,
) -> None:
    layer = Layer(tokens, experts, width, inner)
    ours = layer.experts(cpu, top_k, renormalise=renormalise)
    truth = layer.experts(reference, top_k, renormalise=renormalise, dtype=torch.float64)
    hidden, chosen, weights = cpu.moe_inner(layer.x_TH, layer.logits_TE, ours)
    wanted = reference.moe_inner(layer.x_TH.double(), layer.logits_TE.double(), truth)
    assert torch.equal(chosen, wanted[1])
    assert chosen.dtype == wanted[1].dtype == torch.int32
    assert relative_error(hidden, wanted[0]) < 1e-5
    assert relative_error(weights, wanted[2]) < 1e-5
    y = cpu.moe_outer(hidden, chosen, weights, ours, None, None)
    assert relative_error(y, reference.moe_outer(*wanted, truth, None, None)) < 1e-5


@pytest.mark.parametrize("variant", ["cpu", "reference"])
def test_the_halves_are_each_tokens_sum_over_its_most_probable_experts(
    request: pytest.FixtureRequest, variant: str
) -> None:
    """Written out in another way, so that a mistake which both halves share shows."""
    ops: Operators = request.getfixturevalue(variant)
    layer = Layer(5, 6, 9, 4)
    probabilities_TE = layer.logits_TE.softmax(-1)
    y_TH = torch.zeros(5, 9)
    for t in range(5):
        best = sorted(range(6), key=lambda e, t=t: -float(probabilities_TE[t, e]))[:2]
        for e in best:
            gate, up = (layer.gate_up[e] @ layer.x_TH[t]).chunk(2)
            weight = probabilities_TE[t, e] / probabilities_TE[t, best].sum()
            y_TH[t] += weight * (layer.down[e] @ (gate * torch.sigmoid(gate) * up))
    found = moe(ops, layer.x_TH, layer.logits_TE, layer.experts(ops, 2))
    assert relative_error(found, y_TH) < 1e-5


def test_a_token_has_the_same_bits_in_any_batch(cpu: Operators) -> None:
    layer = Layer(50, 6, 40, 24)
    experts = layer.experts(cpu, 3)
    whole = moe(cpu, layer.x_TH, layer.logits_TE, experts)
    for picked in (torch.arange(1), torch.arange(49, -1, -1), torch.arange(7, 50, 3)):
        found = moe(cpu, layer.x_TH[picked], layer.logits_TE[picked], experts)
        assert same_bits(found, whole[picked])


def test_the_sum_runs_in_ascending_order_of_the_experts(cpu: Operators) -> None:
    layer = Layer(20, 6, 40, 24)
    experts = layer.experts(cpu, 5)
    hidden, chosen, weights = cpu.moe_inner(layer.x_TH, layer.logits_TE, experts)
    assert bool((chosen.diff() > 0).all())
    y = torch.zeros(20, 40, dtype=torch.float64)
    for i in range(5):
        for t in range(20):
            down = layer.down[int(chosen[t, i])]
            out = cpu.linear(hidden[t, i : i + 1], cpu.pack(down, None))[0]
            # The product is exact in float64: rounded like a fused multiply-add but for a tie by chance.
            y[t] = (weights[t, i].double() * out.double() + y[t]).float()
    assert same_bits(cpu.moe_outer(hidden, chosen, weights, experts, None, None), y.float())


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (5, 63), (40, 500)])
def test_what_all_tokens_share_comes_last(
    cpu: Operators, reference: Operators, tokens: int, width: int
) -> None:
    """The bits of the three operators one after the other; scores and gates are columns of one product."""
    layer, draw = Layer(tokens, 6, width, 24), torch.Generator().manual_seed(width)
    experts = layer.experts(cpu, 3)
    shared_TH, scores_TS = random(draw, tokens, width), 3 * random(draw, tokens, 16)
    scores_TS[:, :6] = layer.logits_TE
    inner = cpu.moe_inner(layer.x_TH, scores_TS[:, :6], experts)
    for found, packed in zip(inner, cpu.moe_inner(layer.x_TH, layer.logits_TE, experts), strict=True):
        assert torch.equal(found, packed)
    gate_T1 = scores_TS[:, 6:7]
    gated_TH = cpu.sigmoid_mul(shared_TH[:, None], gate_T1.expand_as(shared_TH)[:, None])
    for ops in (cpu, reference):
        mine = experts if ops is cpu else layer.experts(reference, 3)
        routed_TH = ops.moe_outer(*inner, mine, None, None)
        found = ops.moe_outer(*inner, mine, shared_TH, gate_T1)
        if ops is cpu:
            assert same_bits(found, routed_TH + gated_TH)
        assert (
            relative_error(found, routed_TH.double() + shared_TH.double() * gate_T1.double().sigmoid()) < 1e-5
        )


def test_equal_probabilities_go_to_the_lower_ids(cpu: Operators) -> None:
    layer = Layer(3, 5, 8, 8)
    experts = layer.experts(cpu, 2)
    first_two = torch.tensor([0.0, 0.0, -50.0, -50.0, -50.0]).expand(3, 5).contiguous()
    tied = moe(cpu, layer.x_TH, torch.zeros(3, 5), experts)
    assert same_bits(tied, moe(cpu, layer.x_TH, first_two, experts))


def test_hidden_of_another_width_than_down_is_refused(cpu: Operators) -> None:
    """A rank that forgot to gather would read beyond its rows."""
    layer = Layer(3, 5, 8, 8)
    experts = layer.experts(cpu, 2)
    local = replace(experts, gate_up=cpu.pack(layer.gate_up[:, 4:12].contiguous(), None))
    with pytest.raises(AssertionError):
        moe(cpu, layer.x_TH, layer.logits_TE, local)


def test_half_precision_weights_give_the_bits_of_wide_ones(cpu: Operators) -> None:
    layer = Layer(65, 7, 63, 17)
    layer.gate_up, layer.down = layer.gate_up.bfloat16(), layer.down.bfloat16()
    half, wide = layer.experts(cpu, 3, dtype=torch.bfloat16), layer.experts(cpu, 3)
    found = moe(cpu, layer.x_TH, layer.logits_TE, half)
    assert same_bits(found, moe(cpu, layer.x_TH, layer.logits_TE, wide))
