"""The limits of one engine, as plain data."""

from dataclasses import dataclass

from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.settings import ITL_TARGET_S

ANSWER_TOKENS = 256
"""The length that answers are assumed not to exceed in predictions, whatever limit a client sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits of an engine. `capacity_tokens` is the longest sequence that the smallest budget can hold
    when nothing else runs."""

    budget: Budget
    capacity_tokens: int
    vocab_size: int = 1 << 32
    ranks: int = 1  # of the group; the cluster counts the bytes of all ranks together
    extents_min: int = 1  # of the arena; `resize` goes no lower
    checkpoint_strategy: CheckpointStrategy = "lazy"
    checkpoint_interval: int = 1  # pages
    itl_target_s: float = ITL_TARGET_S  # of a step with prompts beside streams; 0: no limit
    overlap: bool = True  # launch the next step before the tokens of this one are read
    idle_interval_s: float = 0.1  # the longest interval between two iterations of an idle step loop
    drafts_max: int = 0  # guessed tokens of a row; 0: no speculation
    audits: bool = True  # check now and then that every byte has one owner
    pools: bool = False  # the model pools, and does not generate
    mtp: bool = False  # a prediction head of the model makes the guesses

    @property
    def roll_pages(self) -> int:
        """The number of pages between checkpoints while decoding; 0: there are none."""
        return 0 if self.checkpoint_strategy == "none" else self.checkpoint_interval

    @property
    def in_flight_tokens(self) -> int:
        """The most tokens of one sequence that steps in flight can run."""
        return self.flights_max * self.budget.tokens_max

    @property
    def flights_max(self) -> int:
        """The maximum number of steps in flight."""
        return 2 if self.overlap else 1
