"""The choice and the weights of a token's experts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from tidemill.kernels.shared.rows import Rows


class Order(NamedTuple):
    """The pairs (token, pick) of a choice, `token * K + pick`, by expert: those of expert e are
    `[starts[e], starts[e + 1])`, in ascending order. Pairs without an expert are left out.

    pairs_N   int32 [T K]
    starts_E  int32 [E + 1]
    """

    pairs_N: Tensor
    starts_E: Tensor


class Choice(NamedTuple):
    """The experts of each token, with their weights.

    experts_TK  int32, ascending, packed; -1: none. A token of a batch's padding has no expert, and in
                `own_experts` other ranks have some of them
    weights_TK  float, packed; 0 without an expert
    order       what a variant computes once for both halves of the sum, if it needs to
    """

    experts_TK: Tensor
    weights_TK: Tensor
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """The rules by which `route` converts the logits of E experts.

    top_k         the experts of a token
    renormalise   the weights of a token's experts sum to 1, before `scale`
    score         of an expert, from its logit: its share among all, or its own sigmoid
    bias_E        float32, added to the scores for the choice, not for the weights; None: none
    groups        equal parts of the experts, in order; a token chooses from the `groups_kept` parts whose
                  two best experts have the highest sum (DeepSeek-V3, arXiv 2412.19437)
    scale         a factor of the weights of routed experts
    shared        the number of experts after the others that every token chooses, with the weight 1
    gated         ... or with the sigmoid of one more logit, the last
    """

    top_k: int
    renormalise: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias_E: Tensor | None = None
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    shared: int = 0
    gated: bool = False

    def check(self, experts: int) -> None:
        """Assert that it can route this number of experts."""
        assert experts % self.groups == 0
        assert 1 <= self.groups_kept <= self.groups
        assert 1 <= self.top_k <= experts // self.groups * self.groups_kept
        assert self.groups == 1 or experts // self.groups >= 2
        assert self.bias_E is None or self.bias_E.shape == (experts,)
        assert self.shared > 0 or not self.gated


class RouteTokens(Protocol):
    """The type of `route`."""

    def __call__(self, logits_TE: Tensor, routing: Routing, rows: Rows | None = None, /) -> Choice: ...
