"""The choice and the weights of a token's experts."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The rules by which `route` converts the logits of E experts.

    top_k         the experts of a token
    renormalise   the weights of a token's experts sum to 1, before `scale`
    score         of an expert, from its logit: its share among all, or its own sigmoid
    bias_E        float32, added to the scores for the choice, not for the weights; None: none
    groups        equal parts of the experts, in order; a token chooses from the `groups_kept` parts whose
                  two best experts have the highest sum (DeepSeek-V3, arXiv 2412.19437)
    scale         a factor of all weights
    """

    top_k: int
    renormalise: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias_E: Tensor | None = None
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Assert that it can route this number of experts."""
        assert experts % self.groups == 0
        assert 1 <= self.groups_kept <= self.groups
        assert 1 <= self.top_k <= experts // self.groups * self.groups_kept
        assert self.groups == 1 or experts // self.groups >= 2
        assert self.bias_E is None or self.bias_E.shape == (experts,)
