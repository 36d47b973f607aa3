"""What a worker reports about itself: its work and its memory."""

from collections.abc import Sequence as Seq

from tidemill.kvstore.ledger import Ledger
from tidemill.workers.messages import MemoryUse, WorkerLoad
from tidemill.workers.sequence import Sequence
from tidemill.workers.transfer import Transfer


def load_of(
    ledger: Ledger, running: Seq[Sequence], waiting: Seq[Sequence], transfer: Transfer, steps: int
) -> WorkerLoad:
    layout = ledger.layout
    stats = transfer.store.stats()
    waiting_pages = sum(-(-len(one.tokens) // layout.page_tokens) for one in waiting)
    return WorkerLoad(
        queued_tokens=sum(one.target - one.computed for one in (*running, *waiting)),
        running_rows=len(running),
        waiting_rows=len(waiting),
        memory=memory_use(ledger),
        budget_bytes=ledger.budget_extents * layout.extent_bytes,
        wanted_bytes=waiting_pages * layout.page_bytes + len(waiting) * layout.state_stride_bytes,
        state_slots=ledger.num_slots,
        counters={
            **ledger.counters,
            "steps": float(steps),
            "store_hits": stats.hits,
            "store_misses": stats.misses,
            "store_corrupt": stats.corrupt,
            "store_refused": stats.refused,
            "store_put_bytes": stats.put_bytes,
            "store_get_bytes": stats.get_bytes,
        },
    )


def memory_use(ledger: Ledger) -> MemoryUse:
    layout, usage = ledger.layout, ledger.usage()
    pages_live, pages_cached = usage.pages_held * layout.page_bytes, usage.pages_kept * layout.page_bytes
    states_live = usage.states_held * layout.state_stride_bytes
    states_cached = usage.states_kept * layout.state_stride_bytes
    open_bytes = (usage.page_extents + usage.state_extents) * layout.extent_bytes
    return MemoryUse(
        pages_live=pages_live,
        pages_cached=pages_cached,
        states_live=states_live,
        states_cached=states_cached,
        free=open_bytes - pages_live - pages_cached - states_live - states_cached,
        empty=usage.empty_extents * layout.extent_bytes,
        unmapped=usage.unmapped_extents * layout.extent_bytes,
    )
