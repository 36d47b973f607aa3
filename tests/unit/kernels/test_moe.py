"""`moe` against its definition; a token's sum does not depend on who else is in the batch."""

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

    def run(self, ops: Operators, top_k: int, *, renormalise: bool, dtype: torch.dtype) -> torch.Tensor:
        gate_up, down = (ops.pack(weight.to(dtype), None) for weight in (self.gate_up, self.down))
        experts = Experts(gate_up, down, top_k, renormalise)
        return ops.moe(self.x_TH.to(dtype), self.logits_TE.to(dtype), experts)


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
    wanted = layer.run(reference, top_k, renormalise=renormalise, dtype=torch.float64)
    found = layer.run(cpu, top_k, renormalise=renormalise, dtype=torch.float32)
    assert relative_error(found, wanted) < 1e-5


def test_a_token_has_the_same_bits_in_any_batch(cpu: Operators) -> None:
    layer = Layer(50, 6, 40, 24)
    experts = Experts(cpu.pack(layer.gate_up, None), cpu.pack(layer.down, None), 3, renormalise=True)
    whole = cpu.moe(layer.x_TH, layer.logits_TE, experts)
    for picked in (torch.arange(1), torch.arange(49, -1, -1), torch.arange(7, 50, 3)):
        found = cpu.moe(layer.x_TH[picked], layer.logits_TE[picked], experts)
        assert same_bits(found, whole[picked])


def test_equal_probabilities_go_to_the_lower_ids(cpu: Operators) -> None:
    layer = Layer(3, 5, 8, 8)
    experts = Experts(cpu.pack(layer.gate_up, None), cpu.pack(layer.down, None), 2, renormalise=True)
    first_two = torch.tensor([0.0, 0.0, -50.0, -50.0, -50.0]).expand(3, 5).contiguous()
    assert same_bits(cpu.moe(layer.x_TH, torch.zeros(3, 5), experts), cpu.moe(layer.x_TH, first_two, experts))
