"""One forward pass as plain integers. The engine decides it, and every rank of a group carries it out."""

from collections.abc import Awaitable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.layout import CheckpointId, PageId, StateId, WindowId
from tidemill.kvstore.memory.lease import StateSave, StateWrite
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.messages import RequestError, TokenLogprob

PENDING = -1
"""A placeholder for the token that the same sequence draws in the previous step, which is not read yet."""


class PagesLost(TidemillError):
    """Pages that a row reads did not arrive: the step is void, and its rows are admitted again."""


class Scores(NamedTuple):
    """The requested logprobs of a row's known tokens: after the token at `offset` in the row and each
    following one, the logprob of each of `targets`, the next tokens of the prompt, and `alternatives` of
    them."""

    offset: int
    targets: tuple[int, ...]
    alternatives: int


class Row(NamedTuple):
    """`tokens` of one sequence, the first at position `start`. The page table covers them. So does that of
    window pages, in a model that has some; an entry is 0 where no query sees the page any more.

    `read` is the state after `start` tokens (None: the empty state). `writes` are the states to write at
    depths inside the row and at its end, ascending (none in a model without states). The last `drafts` tokens
    are unconfirmed guesses: each has its own slot among `writes`.

    If checkpoints are a class of their own, `restores` is copied to `read` before the step, and `saves` are
    copied after it.

    `sampling_state` is set when the row ends at the last known token or at guesses after it. The first token
    is drawn at position `start + len(tokens) - drafts`, and another one after each guess that was right.

    While pages before `start` are being fetched, `arrivals` end when a slice of all of them is here and
    verified, or with PagesLost. No layer reads pages of its slice earlier.
    """

    sequence_id: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[PageId, ...]
    read: StateId | None
    writes: tuple[StateWrite, ...]
    drafts: int = 0
    sampling_state: SamplingState | None = None
    scores: Scores | None = None
    windows: tuple[WindowId, ...] = ()
    restores: CheckpointId | None = None
    saves: tuple[StateSave, ...] = ()
    arrivals: tuple[Future[None], ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_prompt(self) -> bool:
        """True if it runs more than one known token, rather than decode."""
        return len(self.tokens) - self.drafts > 1


Step = tuple[Row, ...]


class Drawn(NamedTuple):
    """The draws of one row: none, or a token, preceded by those of its guesses that were right.

    `logprobs` has an item for each token if the request asks for them, else none. `scores` has one for each
    target of the row's `scores`. `guesses` are those of the model's own head for the next tokens.

    `pooled` is the answer of a request that pools, as in Delta.

    `late`: the mask of its grammar was not ready in time, so nothing of the row counts. `error` ends its
    request.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    guesses: tuple[int, ...] = ()
    late: bool = False
    error: RequestError | None = None
    pooled: bytes = b""


class Runner(Protocol):
    """Runs steps on the arena, one after the other in the order of the calls. It is the model, or in the
    simulator a fake that cannot cheat."""

    def run(self, step: Step) -> Awaitable[list[Drawn]]:
        """Start the step, and return the draws of each row when it ends.

        If the awaited answer raises, nothing of the step counts. A step without rows, which only groups have,
        ends when all ranks have met.
        """
        ...
