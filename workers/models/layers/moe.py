"""A mixture of experts: each token runs a few of them, and perhaps one that all tokens share."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeAlias

import torch
from torch.nn import functional

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.moe.experts import Experts, with_shared
from tidemill.kernels.moe.routing import Choice, Routing
from tidemill.workers.models.layers.mlp import Dense, DenseConfig
from tidemill.workers.models.layers.work import Read, Work, matrix_flops
from tidemill.workers.models.loading.config_json import require
from tidemill.workers.models.loading.experts import ExpertTensors, Form
from tidemill.workers.models.loading.sharding import RankPart, Replicated
from tidemill.workers.models.loading.weights import Weight

ROWS = 16
"""The number of scores is a multiple of this, 64 bytes: a device has fewer kernels to choose from
otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The choice of a token's experts; see kernels/moe/routing.py. `bias` is the name of a tensor that is
    added to the scores, `choice_bias` that of one which affects only the choice."""

    weight: str
    top_k: int
    renormalise: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: str | None = None
    choice_bias: str | None = None
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """`count` experts of width `inner`.

    stored      the form of the tensors `into` and `back`; see loading/experts.py
    shared      an expert that all tokens run; `shared_gate` is the name of its gate, if it has one
    own         the half-open range of the experts that this rank has whole; None: it has columns of each
    joins       the shared expert may run among the others
    """

    router: RouterConfig
    count: int
    inner: int
    stored: Form = "separate"
    into: str = "mlp.experts"
    back: str = ""
    activation: Literal["silu", "clamped"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    shared: DenseConfig | None = None
    shared_gate: str | None = None
    own: tuple[int, int] | None = field(default=None, repr=False)
    joins: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        """Raise ModelError for a choice that tokens cannot make."""
        top_k, groups, kept = self.router.top_k, self.router.groups, self.router.groups_kept
        alone = groups == 1 and kept == 1
        require(
            alone or (kept <= groups and self.count % groups == 0 and self.count >= 2 * groups),
            f"{self.count} experts in {groups} groups, of which tokens choose from {kept}: not supported",
        )
        most = self.count // groups * kept
        require(top_k <= most, f"{top_k} experts for each token, of {most} that it can choose from")

    def weights(self, hidden: int) -> dict[str, Weight]:
        return self._common_weights(hidden) | self._tensors.weights(hidden)

    def token_flops(self, hidden: int) -> float:
        own = 6.0 * self.router.top_k * self.inner * hidden
        return matrix_flops(self._common_weights(hidden)) + own

    def _common_weights(self, hidden: int) -> dict[str, Weight]:
        """Return the weights that every token uses."""
        router = self.router
        found = {router.weight: Weight((self.count, hidden), Replicated(), role="precise")}
        for name in (router.bias, router.choice_bias):
            if name is not None:
                found[name] = Weight((self.count,), Replicated())
        if self.shared is not None:
            found |= self.shared.weights(hidden)
        if self.shared_gate is not None:
            found[self.shared_gate] = Weight((1, hidden), Replicated(), role="precise")
        return found

    def part(self, rank: RankPart) -> Self:
        if rank.by_expert:
            require(
                self.count % rank.size == 0,
                f"{rank.size} ranks cannot divide {self.count} experts: leave out --enable-expert-parallel",
            )
            share = self.count // rank.size
            return replace(self, own=(rank.index * share, (rank.index + 1) * share), joins=False)
        fits = rank.size == 1 or (rank.sums and self.inner % rank.size == 0)
        return replace(self, joins=self.joins and fits)

    def load(self, read: Read, ops: Operators) -> "Moe":
        router = self.router
        names = [router.weight] if self.shared_gate is None else [router.weight, self.shared_gate]
        scores_SH = torch.cat([read(name).values for name in names])
        bias_S = None if router.bias is None else read(router.bias).values
        if bias_S is not None or scores_SH.device.type == "cpu":
            scores_SH = scores_SH.float()  # x would be rounded on CPU, a bias on a device: it chooses others
        missing = -len(scores_SH) % ROWS
        joined = self.joined if ops.joins_shared and self.joins else 0
        return Moe(
            config=self,
            scores=ops.pack(
                [plain(functional.pad(scores_SH, (0, 0, 0, missing)))],
                None if bias_S is None else functional.pad(bias_S, (0, missing)),
            ),
            routing=Routing(
                top_k=router.top_k,
                renormalise=router.renormalise,
                score=router.score,
                bias_E=None if router.choice_bias is None else read(router.choice_bias).values.float(),
                groups=router.groups,
                groups_kept=router.groups_kept,
                scale=router.scale,
                shared=joined,
                gated=joined > 0 and self.shared_gate is not None,
            ),
            experts=self._load_experts(read, ops, joined),
            shared=None if self.shared is None or joined else self.shared.load(read, ops),
        )

    @property
    def joined(self) -> int:
        """The experts that the shared one makes beside the others: one as wide, or several that split its
        columns. 0: it is no multiple of them."""
        shared = self.shared
        if shared is None or shared.bias or self.stored == "woven" or self.activation != "silu":
            return 0
        return 0 if shared.inner % self.inner else shared.inner // self.inner

    @property
    def _tensors(self) -> ExpertTensors:
        return ExpertTensors(self.stored, self.count, self.inner, self.into, self.back)

    def _load_experts(self, read: Read, ops: Operators, joined: int) -> Experts:
        gate_up, down, gate_up_bias, down_bias = self._tensors.read(read, self.own)
        if joined and self.shared is not None:
            gate_up, down = with_shared(gate_up, down, *self.shared.matrices(read), count=joined)
        return Experts(
            ops.pack([gate_up], gate_up_bias),
            ops.pack([down], down_bias),
            self.activation,
            self.alpha,
            self.limit,
        )


Parts: TypeAlias = tuple[torch.Tensor, Choice, Experts, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """The experts with their weights. `scores` gives a logit of each expert, then that of the shared expert's
    gate. `shared` None: there is no such expert, or it is among the others."""

    config: MoeConfig
    scores: Packed
    routing: Routing
    experts: Experts
    shared: Dense | None

    def run(self, h_TH: torch.Tensor, work: Work) -> torch.Tensor:
        return work.ops.moe_outer(*self._parts(h_TH, work))

    def run_and_norm(
        self, h_TH: torch.Tensor, work: Work, x_TH: torch.Tensor, norm_H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `add_norm` of `x_TH` and `run`; of all columns, so for one rank alone."""
        return work.ops.moe_outer_norm(*self._parts(h_TH, work), x_TH, norm_H, work.epsilon)

    def _parts(self, h_TH: torch.Tensor, work: Work) -> Parts:
        """Return what `moe_outer` adds up."""
        ops, experts, count = work.ops, self.experts, self.config.count
        scores_TS = ops.logits(h_TH, self.scores)
        choice = ops.route(scores_TS[:, : count + self.routing.gated], self.routing, work.inputs)
        if self.config.own is not None:
            choice = self._own(choice, self.config.own, work)
        hidden_TKI = ops.moe_inner(h_TH, choice, experts)
        whole_TKI = hidden_TKI
        if not work.sums:
            whole_NI = work.ranks.gather(hidden_TKI.flatten(0, 1), experts.down.in_features)
            whole_TKI = whole_NI.view(*choice.experts_TK.shape, -1)
        if self.shared is None:
            return whole_TKI, choice, experts, None, None
        gate_T1 = None if self.config.shared_gate is None else scores_TS[:, count : count + 1]
        return whole_TKI, choice, experts, self.shared.run(h_TH, work), gate_T1

    @staticmethod
    def _own(choice: Choice, own: tuple[int, int], work: Work) -> Choice:
        """Count the load of all ranks, and return the choice among this rank's experts."""
        first, end = own
        if work.expert_pairs_R is not None:
            ranks_R = torch.arange(work.ranks.size, device=choice.experts_TK.device)
            of_ranks_TK = choice.experts_TK.div(end - first, rounding_mode="floor")
            work.expert_pairs_R.add_((of_ranks_TK == ranks_R[:, None, None]).sum((1, 2)))
        return work.ops.own_experts(choice, first, end)
