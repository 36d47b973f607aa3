"""An entry of the prefix index: a full page, and the checkpoint after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import CheckpointId, Layout, PageId, StateId, WindowId


class Checkpoint(NamedTuple):
    """The objects that restore a depth in addition to its pages. Fields have the names of their classes.

    states          the slot of the state, if the model has states
    windows         the pages of the last window, left to right, if the model has windows
    checkpoints     the slot of the state, in place of `states`, if checkpoints are a class of their own
    """

    states: tuple[StateId, ...] = ()
    windows: tuple[WindowId, ...] = ()
    checkpoints: tuple[CheckpointId, ...] = ()

    def by_class(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the name of each class, with the ids of its objects."""
        return zip(self._fields, self, strict=True)

    @property
    def state(self) -> StateId | None:
        return self.states[0] if self.states else None

    @property
    def saved(self) -> tuple[StateId, ...] | tuple[CheckpointId, ...]:
        """The slot of the state, of whatever class."""
        return self.states or self.checkpoints

    def num_bytes(self, layout: Layout) -> int:
        return len(self.saved) * layout.saved_stride_bytes + len(self.windows) * layout.window_bytes


@dataclass(slots=True, eq=False)
class Entry:
    """A full page in the index.

    `score`, `saved_flops` and `freed_bytes` belong to its checkpoint, or to the page if the model
    needs no checkpoints.

    depth_pages     the number of pages of the path, this one included
    score           the eviction order: (value, time of last use); the least goes first
    saved_flops     the compute that a hit saves
    freed_bytes     the memory that its eviction frees
    clock           the clock of the index when the page was inserted
    uses            0 for a spare checkpoint, at which no request has resumed
    retained_s      the length of the credit that a client asked for, until `retained_until_s`; kept after it
    tokens, salt    the tokens of the page and the salt of its keys, kept only while changes are logged
    """

    key: PageKey
    parent: "Entry | None"
    depth_pages: int
    page: PageId
    checkpoint: Checkpoint | None = None
    pins: int = 0
    checkpoint_pins: int = 0
    children: list["Entry"] = field(default_factory=list["Entry"])
    child_index: int = 0  # its index in the children of its parent
    last_use: int = 0
    clock: float = 0.0
    uses: int = 1
    score: tuple[float, int] = (0.0, 0)  # on equal values the less recently used goes first
    saved_flops: float = 0.0
    freed_bytes: int = 0
    retained_s: float = 0.0
    retained_until_s: float = 0.0
    tokens: Sequence[int] = ()
    salt: str = ""
