"""`route`, `moe_inner` and `moe_outer`: layers of experts, cases, and what each variant must give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tests.support.kernels.cases import LIMITS, random, relative_error, same_bits
from tidemill.kernels.dispatch import REFERENCE, Operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice, Routing
from tidemill.kernels.rms_norm.reference import rms_norm

Activation = Literal["silu", "clamped"]


@dataclass(frozen=True)
class Layer:
    x_TH: torch.Tensor
    logits_TE: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor

    def experts(self, ops: Operators, activation: Activation = "silu", *, biases: bool = False) -> Experts:
        gate_up, down = (
            ops.pack([plain(weight)], bias if biases else None)
            for weight, bias in ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias))
        )
        return Experts(gate_up, down, activation, limit=1.5)

    def to(self, to: Any) -> "Layer":  # noqa: ANN401 - a type or a device
        return Layer(*(part.to(to) for part in vars(self).values()))

    def rows(self, rows: Sequence[int]) -> "Layer":
        return replace(self, x_TH=self.x_TH[rows], logits_TE=self.logits_TE[rows])

    def of(self, own: slice) -> "Layer":
        """Return the layer with some of its experts."""
        weights = ("gate_up", "down", "gate_up_bias", "down_bias")
        return replace(self, **{name: getattr(self, name)[own].clone() for name in weights})


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


def choose(ops: Operators, layer: Layer, top_k: int) -> Choice:
    return ops.route(layer.logits_TE, Routing(top_k, renormalise=True))


def moe(
    ops: Operators, layer: Layer, top_k: int, experts: Experts | None = None, choice: Choice | None = None
) -> torch.Tensor:
    experts, choice = experts or layer.experts(ops), choice or choose(ops, layer, top_k)
    return ops.moe_outer(ops.moe_inner(layer.x_TH, choice, experts), choice, experts, None, None)


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int
    experts: int
    top_k: int
    width: int
    inner: int
    dtype: torch.dtype = torch.float32
    activation: Activation | None = None  # with biases
    wide: bool = False  # x and logits in float32


ACTIVATIONS: dict[int, Activation] = {2: "silu", 20: "clamped"}
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
    for dtype in LIMITS
    for tokens, experts, top_k, width, inner in SIZES
} | {
    "float32 into bfloat16": Case(
        tokens=9, experts=4, top_k=2, width=40, inner=20, dtype=torch.bfloat16, wide=True
    )
}  # fmt: skip


def check(case: Case, ops: Operators, device: str = "cpu") -> None:
    """Against the definition in float64, on the host; with and without an expert for all, and its gate."""
    layer = layer_of(case.tokens, case.experts, case.width, case.inner, case.dtype)
    if case.wide:
        x_TH = random(torch.Generator().manual_seed(1), case.tokens, case.width)
        layer = replace(layer, x_TH=x_TH, logits_TE=layer.logits_TE.float())
    wide, ours, limit = layer.to(torch.float64), layer.to(device), LIMITS[case.dtype]
    activation, biases = case.activation or "silu", case.activation is not None
    experts, truth = (
        ours.experts(ops, activation, biases=biases),
        wide.experts(REFERENCE, activation, biases=biases),
    )
    routing = Routing(case.top_k, renormalise=case.tokens != 20)
    choice, wanted = ops.route(ours.logits_TE, routing), REFERENCE.route(wide.logits_TE, routing)
    assert torch.equal(choice.experts_TK.cpu(), wanted.experts_TK)
    assert (choice.experts_TK.dtype, choice.weights_TK.dtype) == (torch.int32, torch.float32)
    assert relative_error(choice.weights_TK.cpu(), wanted.weights_TK) < 1e-5
    hidden, wide_hidden = (
        ops.moe_inner(ours.x_TH, choice, experts),
        REFERENCE.moe_inner(wide.x_TH, wanted, truth),
    )
    assert hidden.dtype == case.dtype
    assert relative_error(hidden.cpu(), wide_hidden) < limit
    draw = torch.Generator().manual_seed(1)
    shared_TH = random(draw, case.tokens, case.width).to(case.dtype)
    gate_T1 = 3 * random(draw, case.tokens, 3)[:, 1:2]
    residual_TH, norm_H = random(draw, case.tokens, case.width), random(draw, case.width)
    for parts in ((None, None), (shared_TH, None), (shared_TH, gate_T1)):
        shared, gate = (part if part is None else part.to(device) for part in parts)
        y = ops.moe_outer(hidden, choice, experts, shared, gate)
        assert y.dtype == case.dtype
        wide_parts = (part if part is None else part.double() for part in parts)
        truth_TH = REFERENCE.moe_outer(wide_hidden, wanted, truth, *wide_parts)
        assert relative_error(y.cpu(), truth_TH) < limit
        total, weight = residual_TH.clone().to(device), norm_H.to(device)
        total, normed = ops.moe_outer_norm(hidden, choice, experts, shared, gate, total, weight, 1e-6)
        assert (total.dtype, normed.dtype) == (torch.float32, case.dtype)
        assert relative_error(total.cpu() - residual_TH, truth_TH) < limit
        truth_norm = rms_norm(total.cpu().double(), norm_H.double(), 1e-6)
        assert relative_error(normed.cpu(), truth_norm) < limit


def check_any_batch(ops: Operators, layer: Layer, **options: Any) -> None:  # noqa: ANN401 - of `Layer.experts`
    """A token has the same bits in any batch."""
    experts, last = layer.experts(ops, **options), len(layer.x_TH) - 1
    whole = moe(ops, layer, 3, experts)
    for rows in ([0], [last, 5, 7], [*range(7, last, 3)], [*range(last, -1, -1)]):
        assert same_bits(moe(ops, layer.rows(rows), 3, experts), whole[rows])


def check_ranks(ops: Operators, layer: Layer, each: int) -> None:
    """Ranks with `each` of the experts add up; of several tokens, some have none of a rank's."""
    choice, found, pairs, left_out = choose(ops, layer, 3), torch.zeros_like(layer.x_TH), 0, 0
    wanted = moe(ops, layer, 3, layer.experts(ops, biases=True))
    experts = layer.logits_TE.shape[1]
    for first in range(0, experts, each):
        part, mine = layer.of(slice(first, first + each)), ops.own_experts(choice, first, first + each)
        pairs += int((mine.experts_TK >= 0).sum())
        left_out += int((mine.experts_TK < 0).all(1).sum())
        found += moe(ops, part, 3, part.experts(ops, biases=True), mine)
    assert pairs == choice.experts_TK.numel()
    assert left_out or len(layer.x_TH) == 1
    assert relative_error(found, wanted) < 1e-5
