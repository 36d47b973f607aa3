"""The scheduler: choose the rows of the next step, and take memory for them."""

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.lease import Lease, StepInFlight
from tidemill.kvstore.memory.ledger import FLIGHTS_MAX, Ledger
from tidemill.workers.execution.step import PENDING, Row
from tidemill.workers.scheduling.isolation import IsolatedRuns
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Candidate, Planned, plan
from tidemill.workers.scheduling.prefill_throttle import PrefillThrottle
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.scheduling.sequences import Sequences


@dataclass(slots=True, eq=False)
class Launched:
    """A row of a step in flight."""

    sequence: Sequence
    lease: Lease
    flight: StepInFlight
    row: Row


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of one step. `prompt_tokens` run beside streams; None: the step has no streams."""

    rows: list[Launched]
    prompt_tokens: int | None


NOTHING = Batch([], None)


class Scheduler:
    def __init__(
        self,
        ledger: Ledger,
        limits: EngineLimits,
        sequences: Sequences,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._sequences = sequences
        self._preempt = preempt
        self._prefill_throttle = PrefillThrottle(ledger.layout.page_tokens, limits.itl_target_s)
        self._isolated_runs = IsolatedRuns()
        self._guesses: dict[str, tuple[int, ...]] = {}  # of each stream that the next step can have
        self._guessing = False  # ... or that waits for a step in flight, because of guesses

    def next_step(self, *, in_flight: bool) -> Batch:
        """Plan over the running sequences, the oldest first, and take the memory. Return no rows when there
        is nothing to run, or when a step in flight has to land first.

        When memory is short and no step is in flight, the youngest sequences are preempted.
        """
        if self._ledger.excess:
            if in_flight:
                return NOTHING
            self._shrink()
        planned, prompt_tokens = self._plan(in_flight=in_flight)
        reserved: list[Planned] = []
        for row in planned:
            kept = self._reserve(row, in_flight=in_flight)
            if kept is not None:
                reserved.append(kept)
            elif in_flight:
                return NOTHING
        if not reserved:
            return NOTHING
        if prompt_tokens is not None:
            self._prefill_throttle.launched(prompt_tokens)
        return Batch(
            [self._launch(self._sequences.running[row.sequence_id], row) for row in reserved], prompt_tokens
        )

    def landed(self, step: Batch, seconds: float) -> None:
        """Record how long a step took on the runner."""
        num_tokens = sum(len(planned.row.tokens) for planned in step.rows if planned.row.is_prompt)
        if num_tokens:
            self._sequences.computed_prompts(num_tokens, seconds)
        if step.prompt_tokens is not None:
            self._prefill_throttle.landed(seconds, step.prompt_tokens)

    def _plan(self, *, in_flight: bool) -> tuple[list[Planned], int | None]:
        """Return rows, the oldest first, and their prompt tokens beside streams (None: no streams)."""
        budget = self._limits.budget
        rows = self._isolated_runs.choose(
            sorted(self._sequences.running.values(), key=self._sequences.precedence), in_flight=in_flight
        )
        self._guesses = {}
        self._guessing = False
        candidates = [found for found in map(self._candidate, rows) if found is not None]
        if self._guessing:
            return [], None  # otherwise streams that alternate would divide the batch into halves
        streams = any(candidate.streams for candidate in rows)
        most = self._prefill_throttle.prompt_tokens(budget.tokens_max) if streams else budget.tokens_max
        planned = plan(candidates, budget, most)
        planned.sort(key=lambda row: self._sequences.running[row.sequence_id].seniority)
        prompt_tokens = sum(row.num_tokens for row in planned if row.num_tokens > 1)
        return planned, prompt_tokens if streams else None

    def _candidate(self, sequence: Sequence) -> Candidate | None:
        launched = sequence.launched
        count = sequence.to_run(launched)
        if count == 0:
            self._guessing |= launched > len(sequence.tokens)
            return None
        if not _has_mask(sequence) or _has_flights(sequence):
            return None
        if count > 1:
            return Candidate(sequence.id, launched, launched + count)
        if sequence.drafter is None:
            return Candidate(sequence.id, launched, launched + 1)
        guesses = sequence.guesses(self._drafts_max(sequence))
        if guesses and launched == len(sequence.tokens):
            self._guessing = True  # the next row of a repeating text has guesses when this one has landed
            return None
        self._guesses[sequence.id] = guesses
        return Candidate(sequence.id, launched, launched + 1, len(guesses))

    def _drafts_max(self, sequence: Sequence) -> int:
        """Return the most guesses of the next row. Guesses stop at a page boundary whose state is wanted:
        otherwise the boundary would lie among unconfirmed tokens."""
        most = self._limits.drafts_max
        if self._ledger.layout.hybrid and (
            self._limits.roll_pages or sequence.checkpoints(sequence.launched, sequence.end)
        ):
            most = min(most, -len(sequence.tokens) % sequence.page_tokens)
        return most

    def _shrink(self) -> None:
        """Bring the memory down to its budget."""
        ledger, sequences = self._ledger, self._sequences
        while ledger.excess and not ledger.resize(ledger.budget_extents) and sequences.running:
            ledger.counters["preemptions_for_resize"] += 1
            self._preempt(sequences.youngest)

    def _reserve(self, row: Planned, *, in_flight: bool) -> Planned | None:
        """Extend the lease for the row, without its guesses if memory is short. Return None when there is no
        memory, or when the sequence itself was preempted."""
        sequence = self._sequences.running.get(row.sequence_id)
        while sequence is not None and sequence.lease is not None:
            end = sequence.lease.launched + row.num_tokens + row.drafts
            try:
                self._ledger.reserve(sequence.lease, end, drafts=row.drafts)
            except OutOfMemory:
                pass
            else:
                return row
            if row.drafts:
                row = row._replace(drafts=0)
                continue
            if in_flight or (len(self._sequences.running) == 1 and self._ledger.num_leases > 1):
                return None  # memory of fetches or publications becomes free
            # The only running request has enough memory, but fragmented. Restoring it compacts it.
            victim = self._sequences.youngest
            victim.restore.preemptions += 1
            self._ledger.counters["preemptions"] += 1
            self._preempt(victim)
            sequence = self._sequences.running.get(row.sequence_id)
        return None

    def _launch(self, sequence: Sequence, row: Planned) -> Launched:
        lease = sequence.lease
        assert lease is not None
        start, drafts = lease.launched, row.drafts
        end = start + row.num_tokens
        copies = self._ledger.layout.converts
        boundary = end + drafts if copies else start
        keep = (copies or bool(lease.flights)) and not boundary % sequence.page_tokens
        keep = keep and self._keeps(sequence, boundary)
        inside = sequence.checkpoints(start, end)
        spare = sequence.spares(start, end)
        flight = self._ledger.launch(
            lease, end + drafts, keep=keep, drafts=drafts, inside=inside, spare=spare
        )
        tokens = (PENDING,) if end > len(sequence.tokens) else tuple(sequence.tokens[start:end])
        if drafts:
            tokens += self._guesses[sequence.id][:drafts]
        sampling_state = (
            sequence.sampling_state if not sequence.produces and end >= len(sequence.tokens) else None
        )
        scores = sequence.scores(start, end)
        return Launched(
            sequence,
            lease,
            flight,
            Row(
                sequence.id,
                tokens,
                start,
                lease.pages,
                flight.reads,
                flight.writes,
                drafts,
                sampling_state,
                scores,
                lease.window_table,
                flight.restores,
                flight.saves,
                sequence.restore.arrivals,
            ),
        )

    def _keeps(self, sequence: Sequence, depth: int) -> bool:
        """Return whether the state at the boundary `depth`, where a step in flight or the next one ends,
        becomes a checkpoint."""
        if depth in sequence.restore.wanted or sequence.restore.arrivals:
            return True
        if depth in sequence.restore.grid:
            return sequence.lease is not None and self._ledger.find_spare_slot(sequence.lease, depth)
        return depth > len(sequence.request.tokens) and sequence.rolls(depth, self._limits.roll_pages)


def _has_flights(sequence: Sequence) -> bool:
    """Return whether all its flights are in use: a fetch of its pages is one."""
    return sequence.lease is not None and len(sequence.lease.flights) == FLIGHTS_MAX


def _has_mask(sequence: Sequence) -> bool:
    """Return whether a row can join the next step. With a grammar whose masks are slow it sits out until its
    mask is ready."""
    matcher = sequence.sampling_state.matcher
    if matcher is None or sequence.produces:
        return True
    return matcher.may_launch(in_flight=sequence.lease is not None and bool(sequence.lease.flights))
