"""`moe_inner` and `moe_outer` against their definitions; a token's sum is the same in any batch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import random, relative_error, same_bits
from tests.support.kernels.experts import (
    CASES,
    Activation,
    Case,
    check,
    check_any_batch,
    check_ranks,
    choose,
    layer_of,
    moe,
)
from tidemill.kernels.dispatch import REFERENCE, Operators, operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.shared.rows import integers

WIDE = {name: case for name, case in CASES.items() if case.dtype == torch.float32}


@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_matches_the_definition(cpu: Operators, case: Case) -> None:
    check(case, cpu)


@pytest.mark.parametrize("activation", [None, "silu", "clamped"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (65, 7, 3, 63, 17), (2, 64, 10, 64, 65), (127, 4, 4, 30, 33)]
)
def test_odd_sizes_match_the_definition(
    cpu: Operators, sizes: tuple[int, int, int, int, int], activation: Activation | None
) -> None:
    tokens, experts, top_k, width, inner = sizes
    case = Case(tokens=tokens, experts=experts, top_k=top_k, width=width, inner=inner, activation=activation)
    check(case, cpu)


@pytest.mark.parametrize("variant", ["cpu", "reference"])
@pytest.mark.parametrize("activation", ["silu", "clamped"])
@pytest.mark.parametrize("biases", [True, False])
def test_halves_are_each_tokens_sum_over_its_experts(
    request: pytest.FixtureRequest, variant: str, activation: Activation, *, biases: bool
) -> None:
    """Written out in another way, so that a mistake which both halves share shows."""
    ops: Operators = request.getfixturevalue(variant)
    layer = layer_of(5, 6, 9, 4)
    if not biases:
        layer = replace(layer, gate_up_bias=0 * layer.gate_up_bias, down_bias=0 * layer.down_bias)
    choice, y_TH = choose(ops, layer, 2), torch.zeros(5, 9)
    for t in range(5):
        for e, weight in zip(integers(choice.experts_TK[t]), choice.weights_TK[t], strict=True):
            gate, up = (layer.gate_up[e] @ layer.x_TH[t] + layer.gate_up_bias[e]).chunk(2)
            if activation == "silu":
                hidden = gate * torch.sigmoid(gate) * up
            else:
                gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
                hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            y_TH[t] += weight * (layer.down[e] @ hidden + layer.down_bias[e])
    found = moe(ops, layer, 2, layer.experts(ops, activation, biases=biases))
    assert relative_error(found, y_TH) < 1e-5


@pytest.mark.parametrize(("width", "inner"), [(40, 24), (63, 17), (40, 32), (64, 160)])
def test_products_in_bfloat16_match_the_definition(
    half_cpu: Operators, tmp_path: Path, width: int, inner: int
) -> None:
    layer, reference = layer_of(65, 7, width, inner), operators("reference", tmp_path, "bfloat16")
    choice, half = choose(half_cpu, layer, 3), layer.to(torch.bfloat16)
    biased = replace(half, gate_up_bias=layer.gate_up_bias, down_bias=layer.down_bias)
    ours, truth = (biased.experts(ops, biases=True) for ops in (half_cpu, reference))
    hidden = half_cpu.moe_inner(layer.x_TH, choice, ours)
    assert relative_error(hidden, reference.moe_inner(layer.x_TH.double(), choice, truth)) < 1e-2
    for e in range(len(layer.gate_up)):
        token, pick = torch.where(choice.experts_TK == e)
        into = half_cpu.pack([plain(half.gate_up[e])], layer.gate_up_bias[e])
        back = half_cpu.pack([plain(half.down[e])], None)
        assert same_bits(hidden[token, pick], half_cpu.linear_silu(layer.x_TH[token], into, back))
    y = half_cpu.moe_outer(hidden, choice, ours, None, None)
    double = choice._replace(weights_TK=choice.weights_TK.double())
    assert relative_error(y, reference.moe_outer(hidden.double(), double, truth, None, None)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_has_the_same_bits_in_any_batch(half_cpu: Operators, dtype: torch.dtype) -> None:
    layer = layer_of(50, 6, 40, 24)
    layer = replace(layer, gate_up=layer.gate_up.to(dtype), down=layer.down.to(dtype))
    check_any_batch(half_cpu, layer, activation="clamped", biases=True)


def test_sum_runs_in_ascending_order_of_the_experts(cpu: Operators) -> None:
    layer = layer_of(20, 6, 40, 24)
    choice = choose(cpu, layer, 5)
    hidden = cpu.moe_inner(layer.x_TH, choice, layer.experts(cpu))
    y = torch.zeros(20, 40, dtype=torch.float64)
    for i in range(5):
        for t in range(20):
            down = layer.down[int(choice.experts_TK[t, i])]
            out = cpu.linear(hidden[t, i : i + 1], cpu.pack([plain(down)], None))[0]
            # The product is exact in float64: rounded like a fused multiply-add but for a tie by chance.
            y[t] = (choice.weights_TK[t, i].double() * out.double() + y[t]).float()
    assert same_bits(moe(cpu, layer, 5), y.float())


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (5, 63), (40, 500)])
def test_shared_expert_comes_last(cpu: Operators, tokens: int, width: int) -> None:
    """The bits of the operators one after the other; a gate is a column of a wider product."""
    layer, draw = layer_of(tokens, 6, width, 24), torch.Generator().manual_seed(width)
    shared_TH, gate_T1 = random(draw, tokens, width), 3 * random(draw, tokens, 16)[:, 6:7]
    gated_TH = cpu.sigmoid_mul(shared_TH[:, None], gate_T1.expand_as(shared_TH)[:, None])
    choice = choose(cpu, layer, 3)
    for ops in (cpu, REFERENCE):
        experts = layer.experts(ops)
        inner = ops.moe_inner(layer.x_TH, choice, experts), choice, experts
        routed_TH = ops.moe_outer(*inner, None, None)
        assert same_bits(ops.moe_outer(*inner, shared_TH, None), routed_TH + shared_TH)
        if ops is cpu:
            assert same_bits(ops.moe_outer(*inner, shared_TH, gate_T1), routed_TH + gated_TH)


@pytest.mark.parametrize("variant", ["cpu", "reference"])
def test_experts_of_ranks_add_up(request: pytest.FixtureRequest, variant: str) -> None:
    """Each rank runs its own experts; some tokens have none of a rank's."""
    check_ranks(request.getfixturevalue(variant), layer_of(20, 6, 40, 24), 2)


def test_half_precision_weights_give_the_bits_of_wide_ones(cpu: Operators) -> None:
    layer = layer_of(65, 7, 63, 17)
    half = replace(layer, gate_up=layer.gate_up.bfloat16(), down=layer.down.bfloat16())
    wide = replace(half, gate_up=half.gate_up.float(), down=half.down.float())
    found, wanted = (moe(cpu, each, 3, each.experts(cpu, biases=True)) for each in (half, wide))
    assert same_bits(found, wanted)
