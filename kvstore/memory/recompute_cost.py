"""What a kept page or checkpoint is worth: the compute that a hit on it saves. Pure."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["lru", "value"]
"""What goes first: the least recently used, or what is worth least; see `PrefixIndex`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCost:
    """FLOPs of a forward pass: of a token alone, and of a token per token before it."""

    token_flops: float = 1.0
    context_flops: float = 0.0

    def flops(self, start: int, end: int) -> float:
        """To compute the tokens `[start, end)` of a sequence whose first `start` tokens are there."""
        contexts = (end * (end + 1) - start * (start + 1)) / 2
        return (end - start) * self.token_flops + contexts * self.context_flops
