"""`route` against its definition, and the choice written out; a token has the same experts in any batch."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.kernels.cases import int32, random, relative_error, same_bits
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.moe.routing import Routing
from tidemill.kernels.shared.rows import integers

CASES = {
    "softmax": (7, Routing(3, renormalise=True)),
    "softmax of all": (7, Routing(3, renormalise=False)),
    "every expert": (4, Routing(4, renormalise=False, score="sigmoid", scale=2.5)),
    "softmax and bias": (64, Routing(10, renormalise=True, bias_E=torch.linspace(-0.1, 0.1, 64))),
    "sigmoid": (9, Routing(2, renormalise=True, score="sigmoid", scale=0.5)),
    "groups": (16, Routing(4, renormalise=True, score="sigmoid", groups=4, groups_kept=2)),
    "groups of two": (8, Routing(3, renormalise=False, groups=4, groups_kept=2)),
    "groups, bias and scale": (
        24,
        Routing(
            6,
            renormalise=True,
            score="sigmoid",
            bias_E=torch.linspace(0.8, -0.8, 24),
            groups=6,
            groups_kept=2,
            scale=2.5,
        ),
    ),
}


def logits_of(tokens: int, experts: int) -> torch.Tensor:
    return 2 * random(torch.Generator().manual_seed(experts), tokens, experts)


def double(routing: Routing) -> Routing:
    return replace(routing, bias_E=None if routing.bias_E is None else routing.bias_E.double())


@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize(("experts", "routing"), CASES.values(), ids=CASES)
def test_matches_the_definition(
    cpu: Operators, reference: Operators, tokens: int, experts: int, routing: Routing
) -> None:
    logits_TE = logits_of(tokens, experts)
    chosen, weights, _ = cpu.route(logits_TE, routing)
    wanted = reference.route(logits_TE.double(), double(routing))
    assert chosen.dtype == wanted[0].dtype == torch.int32
    assert torch.equal(chosen, wanted[0])
    assert relative_error(weights, wanted[1]) < 1e-5


@pytest.mark.parametrize("variant", ["cpu", "reference"])
def test_choice_written_out(request: pytest.FixtureRequest, variant: str) -> None:
    """Compare with the DeepSeek-V3 report, written with lists."""
    ops: Operators = request.getfixturevalue(variant)
    experts, routing = CASES["groups, bias and scale"]
    assert routing.bias_E is not None
    logits_TE = logits_of(20, experts)
    chosen_TK, weights_TK, _ = ops.route(logits_TE, routing)
    for t, logits_E in enumerate(logits_TE):
        scores = [1 / (1 + math.exp(-float(logit))) for logit in logits_E]
        biased = [score + float(bias) for score, bias in zip(scores, routing.bias_E, strict=True)]
        groups = [list(range(start, start + 4)) for start in range(0, experts, 4)]
        groups.sort(key=lambda group, b=biased: -sum(sorted(b[e] for e in group)[-2:]))
        allowed = [e for group in groups[:2] for e in group]
        best = sorted(sorted(allowed, key=lambda e, b=biased: -b[e])[:6])
        assert integers(chosen_TK[t]) == best
        total = sum(scores[e] for e in best)
        wanted = [2.5 * scores[e] / total for e in best]
        assert [float(weight) for weight in weights_TK[t]] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("experts", "routing"), CASES.values(), ids=CASES)
def test_token_has_the_same_bits_in_any_batch(cpu: Operators, experts: int, routing: Routing) -> None:
    """The same where its logits are columns of a wider product."""
    wide = torch.full((30, experts + 5), torch.nan)
    wide[:, 2 : 2 + experts] = logits_of(30, experts)
    chosen, weights, _ = cpu.route(wide[:, 2 : 2 + experts], routing)
    assert bool((chosen.diff() > 0).all())
    for picked in (torch.arange(1), torch.arange(29, -1, -1), torch.arange(7, 30, 3)):
        found = cpu.route(wide[picked][:, 2 : 2 + experts].contiguous(), routing)
        assert torch.equal(found[0], chosen[picked])
        assert same_bits(found[1], weights[picked])


def test_equal_scores_go_to_the_lower_ids_and_groups(cpu: Operators) -> None:
    one, grouped = Routing(2, renormalise=True), CASES["groups"][1]
    assert torch.equal(cpu.route(torch.zeros(3, 5), one)[0], int32([[0, 1]] * 3))
    assert torch.equal(cpu.route(torch.zeros(3, 16), grouped)[0], int32([[0, 1, 2, 3]] * 3))
    lower = torch.zeros(1, 16)
    lower[0, 4:8] = -1.0
    chosen_TK, *_ = cpu.route(lower, replace(grouped, top_k=8))
    assert torch.equal(chosen_TK, int32([[0, 1, 2, 3, 8, 9, 10, 11]]))


def test_scores_too_small_to_add_up_are_no_division_by_zero(cpu: Operators, reference: Operators) -> None:
    for ops in (cpu, reference):
        _, weights, _ = ops.route(torch.full((1, 4), -80.0), Routing(2, renormalise=True, score="sigmoid"))
        assert bool((weights < 1e-10).all())
