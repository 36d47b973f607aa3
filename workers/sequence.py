"""One request on one worker, from its arrival to the release of its memory."""

import asyncio
from dataclasses import dataclass, field

from tidemill.kvstore.keys import PageKey, extend_keys
from tidemill.kvstore.layout import restorable_end
from tidemill.kvstore.ledger import Lease
from tidemill.workers.messages import Delta, FinishReason, Provenance, Request


class Preempted:
    """Put into an outbox: the sequence has lost its memory and must be restored."""


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are all known tokens. It runs when `computed < target`; `target` grows with each drawn token.

    `id` is unique on the worker: a retry may arrive while a step still uses the memory of the last attempt.

    0 <= computed <= target <= len(tokens). A producing sequence draws nothing: its target is the last page
    boundary below the end of its prompt.
    """

    id: str
    arrival: int  # counts up; who came earlier goes first, also after a preemption
    request: Request
    root: PageKey
    page_tokens: int
    produces: bool
    tokens: list[int]
    target: int
    keys: list[PageKey] = field(default_factory=list[PageKey])
    lease: Lease | None = None  # None while it waits for memory, and after its end
    ended: bool = False
    preemptions: int = 0
    cuts: set[int] = field(default_factory=set[int])  # depths where a checkpoint is wanted
    junctions: set[int] = field(default_factory=set[int])  # ... because prompts part there
    checkpoint_owed: bool = False  # a boundary passed while decoding, and no slot could be had
    provenance: Provenance = field(default_factory=Provenance)
    outbox: asyncio.Queue[Delta | Preempted | Exception] = field(
        default_factory=asyncio.Queue[Delta | Preempted | Exception]
    )

    @property
    def computed(self) -> int:
        return self.lease.committed if self.lease else 0

    @property
    def boundary(self) -> int:
        """The deepest depth that can be restored rather than computed."""
        return restorable_end(len(self.tokens), self.page_tokens)

    @property
    def end(self) -> int:
        """The number of tokens it may grow to."""
        return len(self.request.tokens) + (0 if self.produces else self.request.max_new_tokens)

    @property
    def next_cut(self) -> int | None:
        return min((cut for cut in self.cuts | self.junctions if cut > self.computed), default=None)

    def draw(self, token: int) -> FinishReason | None:
        """Append a drawn token; says whether it was the last."""
        self.tokens.append(token)
        extend_keys(self.keys, self.root, self.tokens, self.page_tokens)
        self.target = len(self.tokens)
        if token in self.request.stop_token_ids:
            return "stop"
        if len(self.tokens) == self.end:
            return "length"
        return None


def sequence_of(
    arrival: int, request: Request, root: PageKey, page_tokens: int, *, produces: bool
) -> Sequence:
    tokens = list(request.tokens)
    target = restorable_end(len(tokens), page_tokens) if produces else len(tokens)
    name = f"{request.request_id}#{arrival}"
    sequence = Sequence(name, arrival, request, root, page_tokens, produces, tokens, target)
    extend_keys(sequence.keys, root, tokens, page_tokens)
    return sequence
