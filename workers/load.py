"""What a worker reports about itself: its work and its memory."""

from collections.abc import Sequence as Seq

from tidemill.kvstore.ledger import Ledger
from tidemill.kvstore.store import Got, Put
from tidemill.workers.messages import MemoryUse, WorkerLoad
from tidemill.workers.sequence import Sequence
from tidemill.workers.transfer import Transfer


def load_of(
    ledger: Ledger, running: Seq[Sequence], waiting: Seq[Sequence], transfer: Transfer, steps: int, ranks: int
) -> WorkerLoad:
    """The ledger is that of one rank; all bytes are those of the group."""
    layout = ledger.layout
    stats = transfer.store.stats()
    waiting_pages = sum(-(-len(one.tokens) // layout.page_tokens) for one in waiting)
    wanted_bytes = waiting_pages * layout.page_bytes + len(waiting) * layout.state_stride_bytes
    return WorkerLoad(
        queued_tokens=sum(one.target - one.computed for one in (*running, *waiting)),
        running_rows=len(running),
        waiting_rows=len(waiting),
        memory=memory_use(ledger, ranks),
        budget_bytes=ledger.budget_extents * layout.extent_bytes * ranks,
        wanted_bytes=wanted_bytes * ranks,
        state_slots=ledger.num_slots,
        counters={
            **ledger.counters,
            "steps": float(steps),
            **{f"store_puts_as_{outcome.value}": stats.put.get(outcome, 0) for outcome in Put},
            **{f"store_gets_as_{outcome.value}": stats.got.get(outcome, 0) for outcome in Got},
            "store_put_bytes": stats.put_bytes,
            "store_get_bytes": stats.get_bytes,
            "store_trips": stats.trips,
            "store_is_down": stats.is_down,
        },
    )


def memory_use(ledger: Ledger, ranks: int = 1) -> MemoryUse:
    """Bytes of all `ranks` together."""
    layout, usage = ledger.layout, ledger.usage()
    page_bytes, state_bytes = layout.page_bytes * ranks, layout.state_stride_bytes * ranks
    extent_bytes = layout.extent_bytes * ranks
    pages_live, pages_cached = usage.pages_held * page_bytes, usage.pages_kept * page_bytes
    states_live, states_cached = usage.states_held * state_bytes, usage.states_kept * state_bytes
    open_bytes = (usage.page_extents + usage.state_extents) * extent_bytes
    return MemoryUse(
        pages_live=pages_live,
        pages_cached=pages_cached,
        states_live=states_live,
        states_cached=states_cached,
        free=open_bytes - pages_live - pages_cached - states_live - states_cached,
        empty=usage.empty_extents * extent_bytes,
        unmapped=usage.unmapped_extents * extent_bytes,
    )
