"""One forward pass as plain integers: what the engine decides and every rank of a group carries out."""

from dataclasses import dataclass
from typing import Protocol

from tidemill.kvstore.layout import PageId, StateId
from tidemill.workers.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`tokens` of one sequence, the first of them at position `start`. The page table covers them.

    `read` is the state after `start` tokens (None: the empty state), `write` receives the state after the
    last one (None: the model has no states). `sampling` is set when the row ends at the last known token: the
    next one is drawn at position `start + len(tokens)`.
    """

    sequence_id: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[PageId, ...]
    read: StateId | None
    write: StateId | None
    sampling: Sampling | None


Step = tuple[Row, ...]


class Runner(Protocol):
    """Carries out steps on the arena: the model, or in the simulator a fake that cannot cheat."""

    async def run(self, step: Step) -> list[int | None]:
        """The drawn token of each row, None for rows that draw nothing."""
        ...
