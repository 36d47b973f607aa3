"""What bounds one engine: plain data."""

from dataclasses import dataclass

from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.settings import CheckpointStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """`capacity_tokens` is the longest sequence that the smallest budget can hold when nothing else runs."""

    budget: Budget
    capacity_tokens: int
    ranks: int = 1  # of the group: what the cluster counts in bytes is theirs together
    extents_min: int = 1  # of the arena; `resize` goes no lower
    checkpoint_strategy: CheckpointStrategy = "lazy"
    checkpoint_interval: int = 1  # pages
    overlap: bool = True  # the next step is launched before the tokens of this one are read
    idle_turn_s: float = 0.1  # an idle step loop turns at least so often
    drafts_max: int = 0  # guessed tokens of a row, on trial; 0: no speculation
    mtp: bool = False  # the runner guesses, with a head of the model's own

    @property
    def roll_pages(self) -> int:
        """Pages between checkpoints while decoding; 0: none are made."""
        return 0 if self.checkpoint_strategy == "none" else self.checkpoint_interval

    @property
    def in_flight_tokens(self) -> int:
        """The most that steps in flight can run of one sequence."""
        return self.flights_max * self.budget.tokens_max

    @property
    def flights_max(self) -> int:
        """Steps in flight."""
        return 2 if self.overlap else 1
