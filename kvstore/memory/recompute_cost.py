"""The value of a cached page or checkpoint: the compute that a hit on it saves. Pure."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["lru", "value"]
"""The eviction order: least recently used first, or least valuable first; see `PrefixIndex`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCost:
    """FLOPs of a forward pass: per token, and per pair of a token and a token before it."""

    token_flops: float = 1.0
    context_flops: float = 0.0

    def flops(self, start: int, end: int) -> float:
        """Return the FLOPs to compute the tokens `[start, end)` after `start` cached ones."""
        contexts = (end * (end + 1) - start * (start + 1)) / 2
        return (end - start) * self.token_flops + contexts * self.context_flops
