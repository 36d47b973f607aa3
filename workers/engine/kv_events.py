"""The changes of a prefix index as batches of vLLM's KV events, for routers outside the cluster.

    index.log ── flush, between steps ──> bounded queue ── the publisher's thread ──> events, MessagePack

Pages are the blocks of group 0. In a hybrid model checkpoints are those of group 1, with the kind `mamba`:
the last block alone restores its depth. `restorable_depth` is a field of ours, which vLLM's decoder skips.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, Protocol

import msgspec

from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.entry import Entry
from tidemill.kvstore.memory.prefix_index import ChangeKind, PrefixIndex

PAGES, CHECKPOINTS = 0, 1
"""The groups of blocks."""

EVERYTHING_S_MIN = 1.0
"""The shortest time between two batches with everything that subscribers ask for."""

Change = tuple[ChangeKind, Entry]
Clock = Callable[[], float]


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of one prefix are here.

    `restorable_depth` is the depth in tokens at which a prompt resumes that matches up to the last block.
    A page of a hybrid model has none.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    restorable_depth: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks of one group are no longer here."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """No block is here but those of later events."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one message. `data_parallel_rank` is the number of the worker."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class EventForm:
    """The facts of a worker that its events repeat."""

    page_tokens: int
    hybrid: bool
    kind: str  # of the pages
    medium: str

    @classmethod
    def of(cls, layout: Layout, *, on_cuda: bool) -> "EventForm":
        kind = "mla_attention" if layout.latents else "full_attention"
        return cls(layout.page_tokens, layout.hybrid, kind, "GPU" if on_cuda else "CPU")


class IndexBatch(NamedTuple):
    """The changes of an index between two steps; `clears` if they follow on an empty one."""

    number: int
    ts: float
    clears: bool
    changes: Sequence[Change]


class BatchQueue(Protocol):
    """The queue of the thread that sends batches. `wants_all`: a subscriber missed what is lost."""

    wants_all: bool

    def put(self, batch: IndexBatch) -> None: ...

    def make_room(self) -> int:
        """Drop all that waits if the queue is full, and return how many batches."""
        ...

    def close(self) -> None: ...


class KvEvents:
    """The events of one index. The first batch has everything, and so has one after a loss."""

    def __init__(self, index: PrefixIndex, queue: BatchQueue, counters: Counter[str], now_s: Clock) -> None:
        self._index = index
        self._queue = queue
        self._counters = counters
        self._now_s = now_s
        self._number = int(now_s() * 1e6)  # they grow over restarts of a worker
        self._everything_at_s = -EVERYTHING_S_MIN
        index.log = []
        queue.wants_all = True

    def flush(self) -> None:
        """Queue the changes since the last call. Subscribers see a gap in the numbers of dropped batches."""
        changes = self._index.log
        due = self._queue.wants_all and monotonic() - self._everything_at_s >= EVERYTHING_S_MIN
        if not changes and not due:
            return
        dropped = self._queue.make_room()
        self._counters["kv_event_batches_dropped"] += dropped
        if due or dropped:
            self._everything_at_s = monotonic()
            self._queue.wants_all = False
            changes = list(everything(self._index))
        assert changes is not None
        self._index.log = []
        self._queue.put(IndexBatch(self._number, self._now_s(), bool(due or dropped), changes))
        self._number += 1


def everything(index: PrefixIndex) -> Iterator[Change]:
    """Yield the changes that lead from an empty index to this one, parents before their children."""
    for entry in index:
        yield "stored", entry
    for entry in index:
        if entry.checkpoint is not None:
            yield "kept", entry


def events_of(batch: IndexBatch, form: EventForm) -> list[Event]:
    """Return the events of a batch: one for each run of consecutive pages, one for each checkpoint."""
    events: list[Event] = [AllBlocksCleared()] if batch.clears else []
    before: Change | None = None
    for change in batch.changes:
        kind, entry = change
        last = events[-1] if before is not None else None
        if kind == "stored" and before == ("stored", entry.parent) and isinstance(last, BlockStored):
            _extend(last, entry, form)
        elif before is not None and kind == before[0] != "stored" and isinstance(last, BlockRemoved):
            last.block_hashes.append(entry.key)
        elif kind in {"stored", "kept"}:
            events.append(_stored(kind, entry, form))
        else:
            group = PAGES if kind == "removed" else CHECKPOINTS
            events.append(BlockRemoved([entry.key], form.medium, group))
        before = change
    return events


def _stored(kind: ChangeKind, entry: Entry, form: EventForm) -> BlockStored:
    is_page, is_first = kind == "stored", entry.parent is None
    depth = None if is_page and form.hybrid else entry.depth_pages * form.page_tokens
    return BlockStored(
        block_hashes=[entry.key],
        parent_block_hash=None if entry.parent is None else entry.parent.key,
        token_ids=list(entry.tokens),
        block_size=form.page_tokens,
        lora_id=None,
        medium=form.medium,
        lora_name=None,
        extra_keys=[(entry.salt,)] if entry.salt and is_first else None,
        group_idx=PAGES if is_page else CHECKPOINTS,
        kv_cache_spec_kind=form.kind if is_page else "mamba",
        restorable_depth=depth,
    )


def _extend(event: BlockStored, entry: Entry, form: EventForm) -> None:
    event.block_hashes.append(entry.key)
    event.token_ids += entry.tokens
    if event.extra_keys is not None:
        event.extra_keys.append(None)
    if not form.hybrid:
        event.restorable_depth = entry.depth_pages * form.page_tokens
