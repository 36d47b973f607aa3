"""Commit a landed row: what it computed, what it drew, and its state where a checkpoint is wanted."""

from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.engine.publisher import Publisher
from tidemill.workers.execution.step import Drawn
from tidemill.workers.messages import Delta, FinishReason
from tidemill.workers.scheduling.admission_queue import AdmissionQueue
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.prefix_dedup import InProgressPrefixes
from tidemill.workers.scheduling.scheduler import Launched
from tidemill.workers.scheduling.sequence import Sequence

DELTA_SCORES_MAX = 1024
"""The maximum number of logprobs of a prompt in one message: with 20 alternatives each they take 0.4 MB."""


class StepCommitter:
    def __init__(
        self,
        ledger: Ledger,
        limits: EngineLimits,
        admission_queue: AdmissionQueue,
        in_progress: InProgressPrefixes,
        publisher: Publisher,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._admission_queue = admission_queue
        self._in_progress = in_progress
        self._publisher = publisher

    def commit(self, planned: Launched, drawn: Drawn) -> bool:
        """Commit the row. Return whether it was the last of its sequence: its target is computed, or its
        answer complete."""
        sequence, lease, flight, row = planned.sequence, planned.lease, planned.flight, planned.row
        if lease.ended:
            self.void(planned)
            return False
        finish: FinishReason | None = None
        end, boundary = flight.end, sequence.boundary
        for start in range(0, len(drawn.scores), DELTA_SCORES_MAX):
            some = drawn.scores[start : start + DELTA_SCORES_MAX]
            sequence.delivery.scored += len(some)
            sequence.delivery.inbox.put(Delta(tokens=(), prompt_logprobs=some))
        if row.sampling_state is not None:
            count, finish = self._deliver(planned, drawn)
            end += count - 1 - row.drafts
        self._ledger.commit(lease, end, sequence.keys)
        self._ledger.counters["computed_tokens"] += end - flight.start
        done = sequence.produces and end == sequence.target
        self._publish_inside(sequence, flight.start, boundary)
        self._keep_state(sequence, lease, done=done)
        if sequence.produces and not done:  # its end waits for the checkpoint
            self._publisher.publish(sequence, len(lease.shared_entries), checkpoint=False)
        self._in_progress.advanced(sequence, flight.start)
        if row.is_prompt:
            self._admission_queue.memory_freed()
        if done:
            sequence.delivery.inbox.put(Delta(tokens=()))
        if finish is not None:
            self._publish_turn(sequence, lease)
        return done or finish is not None

    def _deliver(self, planned: Launched, drawn: Drawn) -> tuple[int, FinishReason | None]:
        """Deliver what the row drew or pooled. Return the number of drawn tokens, 1 for what is
        pooled, and why the answer ended."""
        sequence, row = planned.sequence, planned.row
        if drawn.pooled:
            sequence.delivery.inbox.put(Delta(tokens=(), pooled=drawn.pooled, finish="stop"))
            return 1, "stop"
        tokens, logprobs = drawn.tokens, drawn.logprobs
        count, finish = sequence.draw(tokens)
        if sequence.drafter is not None:
            sequence.drafter.accept_proposals(drawn.guesses, len(sequence.tokens))
        self._count(row.drafts, count)
        if count < len(tokens):
            tokens, logprobs = tokens[:count], logprobs[:count]
        sequence.delivery.inbox.put(Delta(tokens=tokens, logprobs=logprobs, finish=finish))
        return count, finish

    def void(self, planned: Launched) -> None:
        """Discard the row: its request has ended, or its step broke."""
        self._ledger.commit(planned.lease, planned.flight.start, planned.sequence.keys)
        self._admission_queue.memory_freed()

    def _count(self, drafts: int, count: int) -> None:
        counters = self._ledger.counters
        counters["generated_tokens"] += count
        if drafts:
            counters["spec_trials"] += 1
            counters["spec_drafted_tokens"] += drafts
            counters["spec_accepted_tokens"] += count - 1
            for position in range(count - 1):
                counters[f"spec_accepted_tokens_at_{position}"] += 1

    def _publish_inside(self, sequence: Sequence, start: int, boundary: int) -> None:
        """Publish the checkpoints inside the row that other requests look for."""
        for depth in sequence.checkpoints(start, sequence.computed):
            if depth in sequence.restore.junctions or depth == boundary:
                self._publisher.publish(sequence, depth // sequence.page_tokens)

    def _keep_state(self, sequence: Sequence, lease: Lease, *, done: bool) -> None:
        depth = lease.committed
        if depth % sequence.page_tokens:
            return
        if depth in sequence.restore.wanted:
            self._ledger.keep_state(lease, last=done)
            if not done and (depth in sequence.restore.junctions or depth == sequence.boundary):
                self._publisher.publish(sequence, depth // sequence.page_tokens)  # for other requests
        elif depth in sequence.restore.grid:
            self._ledger.keep_state(lease, spare=True)
        elif depth > len(sequence.request.tokens) and sequence.rolls(depth, self._limits.roll_pages):
            sequence.checkpoint_owed = not self._ledger.roll_checkpoint(lease)

    def _publish_turn(self, sequence: Sequence, lease: Lease) -> None:
        """Publish where this turn ends: the next turn of the conversation resumes there, on any worker."""
        if not self._ledger.layout.hybrid:
            if lease.shared_entries:
                self._publisher.publish(sequence, len(lease.shared_entries))
        elif lease.rolling is not None and lease.rolling.checkpoint is not None:
            self._publisher.publish(sequence, lease.rolling.depth_pages)
