"""The report of a worker's work and memory."""

from collections.abc import Sequence as Seq

from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.periodic import FAILED_ROUNDS
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.workers.messages import NO_MEMORY, Speed, WorkerLoad
from tidemill.workers.scheduling.limits import ANSWER_TOKENS, EngineLimits
from tidemill.workers.scheduling.prefill_throttle import prompt_slowdown
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.transfer.transfer import Transfer

MATCHED_MAX = 64
"""The maximum number of waiting requests whose prefix is looked up. Later ones count as without a match."""


def load_of(  # noqa: PLR0913, PLR0917  each is a part of the worker
    ledger: Ledger,
    running: Seq[Sequence],
    waiting: Seq[Sequence],
    transfer: Transfer,
    speed: Speed,
    limits: EngineLimits,
    steps: int,
    expert_pairs: Seq[int] = (),
    reserved_peak_bytes: int = 0,
) -> WorkerLoad:
    """Return the load. The ledger is that of one rank; all bytes are those of the group. `expert_pairs` are
    by rank."""
    layout, ranks = ledger.layout, limits.ranks
    starts = [_start(ledger, sequence) for sequence in waiting[:MATCHED_MAX]] + [0] * len(
        waiting[MATCHED_MAX:]
    )
    queued = [(sequence.computed, sequence.target) for sequence in running]
    queued += [(start, sequence.target) for start, sequence in zip(starts, waiting, strict=True)]
    stats = transfer.store.stats()
    missing = (len(sequence.tokens) - start for start, sequence in zip(starts, waiting, strict=True))
    waiting_pages = sum(-(-num_tokens // layout.page_tokens) for num_tokens in missing)
    waiting_windows = sum(
        layout.peak_windows(len(sequence.tokens), limits.in_flight_tokens) for sequence in waiting
    )
    wanted_bytes = waiting_pages * layout.page_bytes + len(waiting) * layout.state_stride_bytes
    wanted_bytes += waiting_windows * layout.window_bytes
    streams = sum(sequence.streams for sequence in running)
    return WorkerLoad(
        queued_tokens=sum(end - start for start, end in queued),
        queued_s=queued_s(speed, queued, limits, streams, _answer_steps(running, waiting)),
        running_rows=len(running),
        waiting_rows=len(waiting),
        streams=streams,
        memory=memory_use(ledger, ranks),
        budget_bytes=ledger.budget_extents * layout.extent_bytes * ranks,
        wanted_bytes=wanted_bytes * ranks,
        state_slots=ledger.num_slots,
        speed=speed,
        counters={
            **ledger.counters,
            "failed_rounds": FAILED_ROUNDS.total(),
            "steps": float(steps),
            **({"torch_reserved_peak_bytes": float(reserved_peak_bytes)} if reserved_peak_bytes else {}),
            **{f"expert_pairs_on_rank_{rank}": float(pairs) for rank, pairs in enumerate(expert_pairs)},
            **{f"store_puts_as_{outcome.value}": stats.put.get(outcome, 0) for outcome in Put},
            **{f"store_gets_as_{outcome.value}": stats.got.get(outcome, 0) for outcome in Got},
            "store_put_bytes": stats.put_bytes,
            "store_get_bytes": stats.get_bytes,
            "store_trips": stats.trips,
            "store_is_down": float(stats.is_down),
            "fetched_bytes": transfer.fetched.num_bytes,
            "fetch_seconds": transfer.fetched.seconds,
            "published_bytes": transfer.published.num_bytes,
            "publish_seconds": transfer.published.seconds,
        },
    )


def queued_s(
    speed: Speed, queued: Seq[tuple[int, int]], limits: EngineLimits, streams: int, answer_steps: int
) -> float:
    """Return how long the ranges of prompt tokens `queued` will take in shared steps, beside streams for at
    most `answer_steps` of them; 0 when it is unknown."""
    tokens_max = limits.budget.tokens_max
    num_tokens = sum(end - start for start, end in queued if end - start > 1)
    pairs = sum((end - start) * (start + end) / 2 for start, end in queued if end - start > 1)
    alone_s = speed.prefill_s(0, num_tokens, tokens_max) + (pairs - num_tokens**2 / 2) * speed.pair_s
    light_s = speed.step_s + max(1, streams) * speed.row_s
    slowdown = prompt_slowdown(
        light_s,
        limits.itl_target_s,
        step_s=speed.step_s,
        token_s=speed.token_s,
        page_tokens=limits.budget.page_tokens,
        tokens_max=tokens_max,
    )
    return min(alone_s * float(slowdown), alone_s + answer_steps * light_s)


def _answer_steps(running: Seq[Sequence], waiting: Seq[Sequence]) -> int:
    """Return the most steps in which prompts run beside the answers of now and of the queue. No prompt of
    the queue runs beside the answer of the last one."""
    now = max((sequence.end - len(sequence.tokens) for sequence in running if sequence.streams), default=0)
    queued = [sequence for sequence in (*running, *waiting) if not sequence.streams]
    return now + sum(min(sequence.end - len(sequence.tokens), ANSWER_TOKENS) for sequence in queued[:-1])


def _start(ledger: Ledger, sequence: Sequence) -> int:
    """Return where a waiting sequence will begin to compute, unless the store has more of it."""
    if sequence.lease is not None:
        return sequence.computed
    keys = sequence.keys[: sequence.restorable // sequence.page_tokens]
    return min(ledger.index.match(keys).restorable_pages * sequence.page_tokens, sequence.target)


def memory_use(ledger: Ledger, ranks: int = 1) -> dict[str, int]:
    """Return the bytes of all `ranks` together, by use."""
    layout, usage = ledger.layout, ledger.usage()
    extent_bytes = layout.extent_bytes * ranks
    use = NO_MEMORY.copy()
    for row in layout.classes:
        use[f"{row.name}_live"] = usage.pinned[row.name] * row.bytes * ranks
        use[f"{row.name}_cached"] = usage.cached[row.name] * row.bytes * ranks
    use["free"] = sum(usage.extents.values()) * extent_bytes - sum(use.values())
    use["empty"] = usage.empty_extents * extent_bytes
    use["unmapped"] = usage.unmapped_extents * extent_bytes
    return use
