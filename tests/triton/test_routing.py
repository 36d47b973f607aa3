"""`route` in Triton: parity with its definition, ties, and padding."""

from dataclasses import replace

import pytest
import torch

from tests.support.kernels.cases import relative_error
from tests.unit.kernels.test_routing import CASES, double, logits_of
from tidemill.kernels.moe import reference
from tidemill.kernels.moe.cuda import route
from tidemill.kernels.moe.routing import Routing


def check(case: tuple[int, Routing], device: str = "cpu") -> None:
    experts, routing = case
    logits_TE = logits_of(20, experts)
    bias_E = None if routing.bias_E is None else routing.bias_E.to(device)
    chosen, weights, _ = route(logits_TE.to(device), replace(routing, bias_E=bias_E))
    wanted = reference.route(logits_TE.double(), double(routing))
    assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(chosen.cpu(), wanted[0])
    assert relative_error(weights.cpu(), wanted[1]) < 1e-5


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: tuple[int, Routing]) -> None:
    check(case)


def test_equal_scores_go_to_the_lower_experts_and_groups() -> None:
    for score in ("softmax", "sigmoid"):
        assert route(torch.zeros(3, 5), Routing(2, renormalise=True, score=score))[0].tolist() == [[0, 1]] * 3
    lower = torch.zeros(1, 16)
    lower[0, 4:8] = -1.0
    routing = replace(CASES["groups"][1], top_k=8)
    assert route(lower, routing)[0].tolist() == [[0, 1, 2, 3, 8, 9, 10, 11]]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf / inf
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("experts", "routing"), CASES.values(), ids=CASES)
def test_poisoned_token_finds_experts_that_exist(experts: int, routing: Routing, poison: float) -> None:
    """The padding of a batch may be anything."""
    logits_TE = logits_of(3, experts)
    logits_TE[1], logits_TE[2, 0] = poison, poison
    chosen_TK = route(logits_TE, routing)[0]
    assert bool((chosen_TK.diff() > 0).all())
    assert 0 <= int(chosen_TK.min()) <= int(chosen_TK.max()) < experts
