"""One request on one worker, from its arrival to the release of its memory."""

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tidemill.kvstore.keys import PageKey, extend_keys
from tidemill.kvstore.layout import restorable_end
from tidemill.kvstore.memory.lease import Lease
from tidemill.workers.execution.ngram_drafter import Drafter
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Scores
from tidemill.workers.inbox import Inbox
from tidemill.workers.messages import Delta, FinishReason, Provenance, Request, Times
from tidemill.workers.scheduling.admission_queue import Precedence

PRIORITY_AGE_S = 10.0
"""The advantage of a priority class in seconds: a request overtakes those of the next lower class that
arrived up to this much earlier. So urgent requests go first, and no request waits forever."""

STRETCH = 16.0
"""A prompt is overtaken by shorter ones for at most this many times the time that it takes alone."""


@dataclass(slots=True, eq=False)
class StoredPrefix:
    """One piece for the store: the first `num_pages` pages of a sequence, except those already stored, then
    the checkpoint at their end if it is wanted."""

    lease_id: str
    lease: Lease
    num_pages: int
    checkpoint: bool


@dataclass(slots=True, eq=False)
class Publication:
    """The progress of storing a sequence: pages `[0, there_pages)` are stored, and `pieces` follow in
    order."""

    pieces: deque[StoredPrefix] = field(default_factory=deque[StoredPrefix])
    there_pages: int = 0
    complete: bool = True  # the last piece that ended was stored
    task: asyncio.Task[None] | None = None


class Preempted:
    """An item of an inbox: the sequence has lost its memory and must be restored."""


class IsolationNotice(NamedTuple):
    """An item of an inbox: notify the caller whether the sequence runs alone."""

    alone: bool


@dataclass(slots=True, eq=False)
class Isolation:
    """The isolation of a sequence, and what its caller knows. See workers/scheduling/isolation.py."""

    until: int = 0  # the depth up to which it runs alone
    alone: bool = False  # the caller knows that it runs alone
    is_notifying: bool = False  # the caller is being notified of a change


@dataclass(slots=True, eq=False)
class Restore:
    """The restoring of a sequence, and the depths of its checkpoints. Admission fills it."""

    timeout: asyncio.Timeout | None = None  # while it waits for memory
    preemptions: int = 0
    cuts: set[int] = field(default_factory=set[int])  # depths that get a checkpoint
    junctions: set[int] = field(default_factory=set[int])  # likewise, where prompts diverge
    grid: range = range(0)  # likewise, in memory that is free anyway
    prefetched_pages: range = range(0)  # fetched from the store before its admission
    admission_s: float = 0.0  # seconds until it had memory, over all admissions, with fetches
    fetch_s: float = 0.0
    stored_pages: int = 0  # that the store seemed to have at its admission
    store: str = ""  # how the last fetch ended, as in CacheLookup
    arrivals: tuple[Future[None], ...] = ()  # of its first row, while its pages are fetched
    lost_slices: bool = False  # a fetch slice by slice failed: the next one is whole

    @property
    def wanted(self) -> set[int]:
        """The depths that get a checkpoint even if others are evicted for it."""
        return self.cuts | self.junctions


Item = Delta | Preempted | IsolationNotice | Exception


@dataclass(slots=True, eq=False)
class Delivery:
    """The deliveries of a sequence: to its caller through the inbox, and to the store."""

    inbox: Inbox[Item] = field(default_factory=Inbox[Item])
    scored: int = 0  # logprobs of the prompt that were delivered
    publication: Publication = field(default_factory=Publication)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it runs. `tokens` are all known tokens. It runs while `computed < target`; `target`
    grows with each drawn token.

    `id` is unique on the worker: a retry may arrive while a step still uses the memory of the last attempt.

    0 <= computed <= launched; computed <= target <= len(tokens). A producing sequence draws nothing: its
    target is the last page boundary below the end of its prompt.

    launched < len(tokens)    the next row runs known tokens
    launched == len(tokens)   the next row runs the token that a step in flight draws
    launched > len(tokens)    guesses are unconfirmed: the next row is known when they have landed
    """

    id: str
    seniority: Precedence  # the smaller goes first, also after a preemption
    request: Request
    root: PageKey
    page_tokens: int
    produces: bool
    tokens: list[int]
    target: int
    sampling_state: SamplingState
    drafter: Drafter | None
    keys: list[PageKey] = field(default_factory=list[PageKey])
    lease: Lease | None = None  # None while it waits for memory, and after its end
    ended: bool = False
    checkpoint_owed: bool = False  # it passed a boundary while decoding, and no slot was free
    provenance: Provenance = field(default_factory=Provenance)
    restore: Restore = field(default_factory=Restore)
    delivery: Delivery = field(default_factory=Delivery)
    isolation: Isolation = field(default_factory=Isolation)

    @property
    def computed(self) -> int:
        return self.lease.committed if self.lease else 0

    @property
    def launched(self) -> int:
        """The number of tokens that are computed when the steps in flight have landed."""
        return self.lease.launched if self.lease else 0

    @property
    def streams(self) -> bool:
        """True if its answer has begun, or will begin when the steps in flight have landed."""
        return not (self.produces or self.request.pools) and self.launched >= len(self.tokens) - 1

    def precedence(self, depth: int, token_s: float) -> Precedence:
        """Return the sort key of its prompt when the tokens before `depth` are there and each of the others
        takes `token_s`: it is later by STRETCH times the time that they take alone."""
        since_s, number = self.seniority
        return since_s + STRETCH * max(0, self.target - depth) * token_s, number

    @property
    def is_suspect(self) -> bool:
        return self.computed < self.isolation.until

    @property
    def boundary(self) -> int:
        """The deepest depth that can be restored rather than computed."""
        return restorable_end(len(self.tokens), self.page_tokens)

    @property
    def restorable(self) -> int:
        """The deepest depth that may be restored. Logprobs of the prompt must be computed here."""
        scored = self.delivery.scored
        return min(self.boundary, scored) if scored < self.request.to_score else self.boundary

    @property
    def end(self) -> int:
        """The number of tokens it may grow to."""
        return len(self.request.tokens) + (0 if self.produces else self.request.max_new_tokens)

    def checkpoints(self, start: int, end: int) -> list[int]:
        """Return the depths between `start` and `end`, both excluded, that get a checkpoint, ascending."""
        if start // self.page_tokens == (end - 1) // self.page_tokens:  # they are page boundaries
            return []
        return sorted(depth for depth in self.restore.wanted if start < depth < end)

    def spares(self, start: int, end: int) -> list[int]:
        """Return the depths between `start` and `end`, both excluded, of spare checkpoints, ascending."""
        step = self.restore.grid.step
        inside = range(start // step * step + step, min(end, self.restore.grid.stop), step)
        return sorted({*inside} - self.restore.wanted) if inside else []

    def to_run(self, launched: int) -> int:
        """Return how many tokens, guesses excluded, the next row can have. It is 0 while the sequence waits
        for a step in flight."""
        if launched < self.target:
            return self.target - launched
        known = len(self.tokens)
        return int(launched == known and known + 1 < self.end and not self.produces)

    def rolls(self, depth: int, interval_pages: int) -> bool:
        """Return whether the state at `depth`, reached while decoding, becomes a checkpoint. Depth 0 never
        does."""
        pages, odd = divmod(depth, self.page_tokens)
        return interval_pages > 0 and not odd and (self.checkpoint_owed or pages % interval_pages == 0)

    def guesses(self, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that may follow the known ones."""
        if self.drafter is None or self.computed < len(self.request.tokens) - 1:
            return ()
        most = min(most, self.end - len(self.tokens) - 1)
        return tuple(self.drafter.propose(self.tokens, most)) if most > 0 else ()

    def scores(self, start: int, end: int) -> Scores | None:
        """Return which logprobs a row that runs `[start, end)` must give: each token scores the next one."""
        alternatives = self.request.sampling.prompt_logprobs
        if alternatives is None or self.produces:
            return None
        first, last = max(start, self.delivery.scored), min(end, self.request.to_score)
        if first >= last:
            return None
        return Scores(first - start, tuple(self.tokens[first + 1 : last + 1]), alternatives)

    def time_since(self, began_s: float, now_s: float) -> None:
        """Record how long its prompt took, from `began_s` on."""
        times = Times(
            waited_s=self.restore.admission_s - self.restore.fetch_s,
            fetched_s=self.restore.fetch_s,
            computed_s=now_s - began_s - self.restore.admission_s,
        )
        self.provenance = replace(self.provenance, times=times)

    def time_stored(self, seconds: float) -> None:
        self.provenance = replace(self.provenance, times=replace(self.provenance.times, stored_s=seconds))

    def draw(self, tokens: Iterable[int]) -> tuple[int, FinishReason | None]:
        """Append drawn tokens up to the last one of the answer. Return how many, and why the answer ended."""
        count, finish = 0, None
        for token in tokens:
            self.tokens.append(token)
            count += 1
            if token in self.request.stop_token_ids:
                finish = "stop"
            elif len(self.tokens) == self.end:
                finish = "length"
            if finish is not None:
                break
        self.target = len(self.tokens)
        if self.target // self.page_tokens > len(self.keys):
            extend_keys(self.keys, self.root, self.tokens, self.page_tokens)
        return count, finish
