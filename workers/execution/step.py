"""One forward pass as plain integers: what the engine decides and every rank of a group carries out."""

from collections.abc import Awaitable
from typing import NamedTuple, Protocol

from tidemill.kvstore.layout import PageId, StateId, WindowId
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.messages import TokenLogprob

PENDING = -1
"""Stands for the token that the same sequence draws in the step before, which nobody has read yet."""


class Scores(NamedTuple):
    """What is wanted of a row's known tokens: behind the one at `offset` in the row and those after it, the
    logprob of each of `targets`, the tokens that follow them in the prompt, and so many `alternatives`."""

    offset: int
    targets: tuple[int, ...]
    alternatives: int


class Row(NamedTuple):
    """`tokens` of one sequence, the first at position `start`. The page table covers them, and that of
    window pages too, in a model that has some: 0 where no query sees them any more.

    `read` is the state after `start` tokens (None: the empty state); `writes` receive the states after the
    last `len(writes)` tokens (none in a model without states). The last `drafts` tokens are guesses on trial:
    each has its own slot among `writes`.

    `draws` is set when the row ends at the last known token or at guesses after it: the first token is drawn
    at position `start + len(tokens) - drafts`, and another one after each guess that was right.
    """

    sequence_id: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[PageId, ...]
    read: StateId | None
    writes: tuple[StateId, ...]
    drafts: int = 0
    sampling_state: SamplingState | None = None
    scores: Scores | None = None
    windows: tuple[WindowId, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_prompt(self) -> bool:
        """Whether it runs more than one token that is known, rather than decode."""
        return len(self.tokens) - self.drafts > 1


Step = tuple[Row, ...]


class Drawn(NamedTuple):
    """What one row drew: nothing, or a token, preceded by those of its guesses that were right.

    `logprobs` has an item for each token if the request asks for them, else none; `scores` one for each of
    the targets of the row's `scores`; `guesses` are of what follows, by a head of the model's own.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    guesses: tuple[int, ...] = ()


class Runner(Protocol):
    """Carries out steps on the arena, one after the other in the order of the calls: the model, or in the
    simulator a fake that cannot cheat."""

    def run(self, step: Step) -> Awaitable[list[Drawn]]:
        """What each row drew. The step is under way when this returns; an exception of the awaited answer
        says that nothing of the step counts. A step without rows (groups alone have them) ends when all ranks
        have come."""
        ...
