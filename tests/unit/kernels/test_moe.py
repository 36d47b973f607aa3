"""`moe_inner` and `moe_outer` against their definitions; a token's sum is the same in any batch."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.support.kernels.cases import random, relative_error, same_bits
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice
from tidemill.kernels.shared.rows import integers

Activation = Literal["silu", "clamped"]


class Layer:
    def __init__(self, tokens: int, experts: int, width: int, inner: int, top_k: int) -> None:
        draw = torch.Generator().manual_seed(experts)
        self.x_TH = random(draw, tokens, width)
        chosen_TK = random(draw, tokens, experts).argsort(-1)[:, :top_k].sort(-1).values.int()
        self.choice = Choice(chosen_TK, random(draw, tokens, top_k))
        self.gate_up, self.down = random(draw, experts, 2 * inner, width), random(draw, experts, width, inner)
        self.biases = random(draw, experts, 2 * inner), random(draw, experts, width)

    @property
    def double(self) -> Choice:
        return self.choice._replace(weights_TK=self.choice.weights_TK.double())

    def experts(
        self,
        ops: Operators,
        dtype: torch.dtype = torch.float32,
        *,
        biases: bool = False,
        activation: Activation = "silu",
    ) -> Experts:
        gate_up, down = (
            ops.pack([plain(weight.to(dtype))], bias if biases else None)
            for weight, bias in zip((self.gate_up, self.down), self.biases, strict=True)
        )
        return Experts(gate_up, down, activation, limit=1.5)

    def run(
        self, ops: Operators, experts: Experts, picked: slice | torch.Tensor = slice(None)
    ) -> torch.Tensor:
        experts_TK, weights_TK, _ = self.choice
        choice = Choice(experts_TK[picked].contiguous(), weights_TK[picked].contiguous())
        hidden_TKI = ops.moe_inner(self.x_TH[picked], choice, experts)
        return ops.moe_outer(hidden_TKI, choice, experts, None, None)


@pytest.mark.parametrize(
    ("biases", "activation"), [(False, "silu"), (True, "silu"), (True, "clamped"), (False, "clamped")]
)
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
    biases: bool,
    activation: Activation,
) -> None:
    layer = Layer(tokens, experts, width, inner, top_k)
    ours = layer.experts(cpu, biases=biases, activation=activation)
    truth = layer.experts(reference, torch.float64, biases=biases, activation=activation)
    hidden = cpu.moe_inner(layer.x_TH, layer.choice, ours)
    wanted = reference.moe_inner(layer.x_TH.double(), layer.choice, truth)
    assert relative_error(hidden, wanted) < 1e-5
    y = cpu.moe_outer(hidden, layer.choice, ours, None, None)
    wanted = reference.moe_outer(wanted, layer.double, truth, None, None)
    assert relative_error(y, wanted) < 1e-5


@pytest.mark.parametrize("variant", ["cpu", "reference"])
@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_halves_are_each_tokens_sum_over_its_experts(
    request: pytest.FixtureRequest, variant: str, activation: Activation
) -> None:
    """Written out in another way, so that a mistake which both halves share shows."""
    ops: Operators = request.getfixturevalue(variant)
    layer = Layer(5, 6, 9, 4, 2)
    y_TH = torch.zeros(5, 9)
    for t in range(5):
        for e, weight in zip(integers(layer.choice.experts_TK[t]), layer.choice.weights_TK[t], strict=True):
            gate, up = (layer.gate_up[e] @ layer.x_TH[t] + layer.biases[0][e]).chunk(2)
            if activation == "silu":
                hidden = gate * torch.sigmoid(gate) * up
            else:
                gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
                hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            y_TH[t] += weight * (layer.down[e] @ hidden + layer.biases[1][e])
    found = layer.run(ops, layer.experts(ops, biases=True, activation=activation))
    assert relative_error(found, y_TH) < 1e-5


@pytest.mark.parametrize(("width", "inner"), [(40, 24), (63, 17), (40, 32), (64, 160)])
def test_products_in_bfloat16_match_the_definition(
    half_cpu: Operators, tmp_path: Path, width: int, inner: int
) -> None:
    layer, reference = Layer(65, 7, width, inner, 3), operators("reference", tmp_path, "bfloat16")
    ours, truth = (layer.experts(ops, torch.bfloat16, biases=True) for ops in (half_cpu, reference))
    hidden = half_cpu.moe_inner(layer.x_TH, layer.choice, ours)
    assert relative_error(hidden, reference.moe_inner(layer.x_TH.double(), layer.choice, truth)) < 1e-2
    for e in range(len(layer.gate_up)):
        token, pick = torch.where(layer.choice.experts_TK == e)
        into = half_cpu.pack([plain(layer.gate_up[e].bfloat16())], layer.biases[0][e])
        back = half_cpu.pack([plain(layer.down[e].bfloat16())], None)
        assert same_bits(hidden[token, pick], half_cpu.linear_silu(layer.x_TH[token], into, back))
    y = half_cpu.moe_outer(hidden, layer.choice, ours, None, None)
    wanted = reference.moe_outer(hidden.double(), layer.double, truth, None, None)
    assert relative_error(y, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_has_the_same_bits_in_any_batch(half_cpu: Operators, dtype: torch.dtype) -> None:
    layer = Layer(50, 6, 40, 24, 3)
    experts = layer.experts(half_cpu, dtype, biases=True, activation="clamped")
    whole = layer.run(half_cpu, experts)
    for picked in (torch.arange(1), torch.arange(49, -1, -1), torch.arange(7, 50, 3)):
        assert same_bits(layer.run(half_cpu, experts, picked), whole[picked])


def test_sum_runs_in_ascending_order_of_the_experts(cpu: Operators) -> None:
    layer = Layer(20, 6, 40, 24, 5)
    experts = layer.experts(cpu)
    hidden = cpu.moe_inner(layer.x_TH, layer.choice, experts)
    y = torch.zeros(20, 40, dtype=torch.float64)
    for i in range(5):
        for t in range(20):
            down = layer.down[int(layer.choice.experts_TK[t, i])]
            out = cpu.linear(hidden[t, i : i + 1], cpu.pack([plain(down)], None))[0]
            # The product is exact in float64: rounded like a fused multiply-add but for a tie by chance.
            y[t] = (layer.choice.weights_TK[t, i].double() * out.double() + y[t]).float()
    assert same_bits(layer.run(cpu, experts), y.float())


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (5, 63), (40, 500)])
def test_shared_expert_comes_last(cpu: Operators, reference: Operators, tokens: int, width: int) -> None:
    """The bits of the three operators one after the other; a gate is a column of a wider product."""
    layer, draw = Layer(tokens, 6, width, 24, 3), torch.Generator().manual_seed(width)
    shared_TH, gate_T1 = random(draw, tokens, width), 3 * random(draw, tokens, 16)[:, 6:7]
    gated_TH = cpu.sigmoid_mul(shared_TH[:, None], gate_T1.expand_as(shared_TH)[:, None])
    inner = cpu.moe_inner(layer.x_TH, layer.choice, layer.experts(cpu)), layer.choice
    for ops in (cpu, reference):
        mine = layer.experts(ops)
        routed_TH = ops.moe_outer(*inner, mine, None, None)
        found = ops.moe_outer(*inner, mine, shared_TH, gate_T1)
        assert same_bits(ops.moe_outer(*inner, mine, shared_TH, None), routed_TH + shared_TH)
        if ops is cpu:
            assert same_bits(found, routed_TH + gated_TH)
        wanted = routed_TH.double() + shared_TH.double() * gate_T1.double().sigmoid()
        assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("variant", ["cpu", "reference"])
def test_experts_of_ranks_add_up(request: pytest.FixtureRequest, variant: str) -> None:
    """Each rank runs its own experts, the shared one in parts; some tokens have none of a rank's."""
    ops: Operators = request.getfixturevalue(variant)
    layer = Layer(20, 6, 40, 24, 3)
    wanted = layer.run(ops, layer.experts(ops, biases=True))
    whole, found, pairs = layer.choice, torch.zeros(20, 40), 0
    gate_up, down, biases = layer.gate_up, layer.down, layer.biases
    for first in (0, 2, 4):
        own = slice(first, first + 2)
        layer.gate_up, layer.down = gate_up[own], down[own]
        layer.biases = biases[0][own], biases[1][own]
        layer.choice = ops.own_experts(whole, first, first + 2)
        assert (layer.choice.experts_TK == -1).all(1).any()
        pairs += int((layer.choice.experts_TK >= 0).sum())
        found += layer.run(ops, layer.experts(ops, biases=True))
    assert pairs == whole.experts_TK.numel()
    assert relative_error(found, wanted) < 1e-5


def test_half_precision_weights_give_the_bits_of_wide_ones(cpu: Operators) -> None:
    layer = Layer(65, 7, 63, 17, 3)
    layer.gate_up, layer.down = layer.gate_up.bfloat16(), layer.down.bfloat16()
    half, wide = layer.experts(cpu, torch.bfloat16, biases=True), layer.experts(cpu, biases=True)
    assert same_bits(layer.run(cpu, half), layer.run(cpu, wide))
