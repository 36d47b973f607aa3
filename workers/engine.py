"""The engine of a worker, for prefill and decode alike: takes requests and runs steps over them.

    request -> admit (memory, fetch) -> plan -> Runner -> advance (commit, draw, checkpoint) -> end

One asyncio loop owns everything here; only the Runner and the store work elsewhere, on memory that is leased.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.lease import Flight, Lease
from tidemill.kvstore.ledger import Ledger
from tidemill.workers.line import Line
from tidemill.workers.load import load_of
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    Announcement,
    Delta,
    Produced,
    Provenance,
    Request,
    RequestError,
    WorkerGone,
    WorkerLoad,
)
from tidemill.workers.plan import Budget, Candidate, plan
from tidemill.workers.publications import Publications
from tidemill.workers.restore import Admission
from tidemill.workers.sequence import Preempted, Sequence, sequence_of
from tidemill.workers.settings import CheckpointStrategy
from tidemill.workers.step import Row, Runner
from tidemill.workers.transfer import Transfer

IDLE_TURN_S = 0.1
LOOP_ENDED = "the worker's step loop has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`capacity_tokens` is the longest sequence that the smallest budget can hold when nothing else runs."""

    budget: Budget
    capacity_tokens: int
    extents_min: int = 1  # of the arena; `resize` goes no lower
    checkpoint_strategy: CheckpointStrategy = "lazy"
    checkpoint_interval: int = 1  # pages


@dataclass(slots=True, eq=False)
class Launched:
    """A row of a step in flight."""

    sequence: Sequence
    lease: Lease
    flight: Flight
    row: Row


class Engine:
    def __init__(
        self,
        ledger: Ledger,
        transfer: Transfer,
        runner: Runner,
        limits: Limits,
        root_of: Callable[[str], PageKey],
    ) -> None:
        self.steps = 0  # turns of the loop, idle ones included: standing still means a wedged step
        self._limits = limits
        self._ledger = ledger
        self._transfer = transfer
        self._runner = runner
        self._root_of = root_of
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self._line = Line()
        self._admission = Admission(
            ledger, transfer, self._line, self._running, self._waiting, limits.checkpoint_strategy
        )
        self._publications = Publications(ledger, transfer, self._line)
        self._producing: dict[PageKey, asyncio.Lock] = {}
        self._work = asyncio.Event()
        self._arrivals = 0
        self._over = False  # the step loop has ended: nobody would run what is admitted now

    async def run(self) -> None:
        """Run steps until cancelled. When it breaks, every stream ends with WorkerGone."""
        try:
            while True:
                self.steps += 1
                step = self._next_step()
                if step:
                    await self._run_step(step)
                    await asyncio.sleep(0)  # streams take their tokens before the next step
                    continue
                self._work.clear()
                try:
                    async with asyncio.timeout(IDLE_TURN_S):
                        await self._work.wait()
                except TimeoutError:
                    pass
        finally:
            self._over = True
            for sequence in [*self._running.values(), *self._waiting.values()]:
                sequence.outbox.put_nowait(WorkerGone(LOOP_ENDED))

    async def produce(self, request: Request) -> Produced:
        """Make the store hold every page below the prompt's last page boundary, and the checkpoint there.

        Idempotent: what the store holds already is not computed again. `depth` is less than asked when the
        store did not take everything.
        """
        self._refuse_what_cannot_fit(request)
        sequence = self._sequence(request, produces=True)
        keys = sequence.keys[: sequence.target // sequence.page_tokens]
        if not keys:
            return Produced(depth=0, provenance=Provenance())
        lock = self._producing.setdefault(keys[-1], asyncio.Lock())
        try:
            async with lock:  # the same prompt twice at once is published once
                if await self._transfer.holds(keys):
                    return Produced(
                        depth=sequence.target, provenance=Provenance(reused_tokens=sequence.target)
                    )
                async for _ in self._stream(sequence):
                    pass
                assert sequence.lease is not None
                stored = await self._transfer.publish(sequence.lease, keys)
        finally:
            self._end(sequence)
            if not lock.locked():
                self._producing.pop(keys[-1], None)
        return Produced(depth=sequence.target if stored else 0, provenance=sequence.provenance)

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """The tokens of `request`, one delta per step; closing the generator cancels it. Raises PagesMissing,
        RequestError, WorkerGone."""
        self._refuse_what_cannot_fit(request)
        sequence = self._sequence(request, produces=False)
        try:
            async with aclosing(self._stream(sequence)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._end(sequence)

    def resize(self, budget_bytes: int) -> None:
        """Change the memory budget while everything runs, in whole extents, between the smallest that serves
        one request and what was reserved. What is kept is evicted at once; running requests are preempted,
        the youngest first, before the next step."""
        extents = budget_bytes // self._ledger.layout.extent_bytes
        self._ledger.resize(max(self._limits.extents_min, min(extents, self._ledger.num_extents)))
        self._line.memory_freed()
        self._work.set()

    def load(self) -> WorkerLoad:
        return load_of(
            self._ledger,
            list(self._running.values()),
            list(self._waiting.values()),
            self._transfer,
            self.steps,
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        """Restorable depths that came and went since the last call, or all of them."""
        changes = self._ledger.index.take_changes()
        added, removed = changes.added, changes.removed
        if full:
            added, removed = set(self._ledger.index.restorable_keys()), set[PageKey]()
        return Announcement(
            added=tuple(key[:ANNOUNCED_KEY_BYTES] for key in added),
            removed=tuple(key[:ANNOUNCED_KEY_BYTES] for key in removed),
            full=full,
        )

    @property
    def num_requests(self) -> int:
        return len(self._running) + len(self._waiting)

    async def drain_publications(self) -> None:
        """Wait until what was being published in the background is stored, or was refused."""
        await self._publications.drain()

    def _sequence(self, request: Request, *, produces: bool) -> Sequence:
        self._arrivals += 1
        return sequence_of(
            self._arrivals,
            request,
            self._root_of(request.salt),
            self._ledger.layout.page_tokens,
            produces=produces,
        )

    def _refuse_what_cannot_fit(self, request: Request) -> None:
        total = len(request.tokens) + request.max_new_tokens
        if not request.tokens or request.max_new_tokens < 1:
            raise RequestError("a request needs at least one prompt token and one new token", param="prompt")
        if total > self._limits.capacity_tokens:
            raise RequestError(
                f"{total} tokens do not fit this worker, which holds {self._limits.capacity_tokens}: "
                "shorten the prompt, lower max_tokens, or give the workers more --memory",
                code="context_length_exceeded",
            )

    async def _stream(self, sequence: Sequence) -> AsyncGenerator[Delta]:
        """Admit the sequence, again after each preemption, and pass on what its steps bring. A producing one
        brings nothing and ends when its target is computed."""
        first = True
        await self._admit(sequence)
        while sequence.computed < sequence.target or not sequence.produces:
            item = await sequence.outbox.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Preempted):
                await self._admit(sequence)
                continue
            if sequence.produces:
                return
            yield Delta(
                tokens=item.tokens, finish=item.finish, provenance=sequence.provenance if first else None
            )
            first = False
            if item.finish is not None:
                return

    async def _admit(self, sequence: Sequence) -> None:
        self._waiting[sequence.id] = sequence
        await self._admission.admit(sequence)
        del self._waiting[sequence.id]
        if sequence.computed < sequence.target:  # else a producing one: all its pages were here
            if self._over:
                raise WorkerGone(LOOP_ENDED)
            self._running[sequence.id] = sequence
            self._work.set()

    def _end(self, sequence: Sequence) -> None:
        """Release all that the sequence holds: the one place, whatever ended it."""
        sequence.ended = True
        self._running.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        self._release(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the memory of a running sequence; its pages stay restorable, it is admitted again."""
        del self._running[sequence.id]
        self._waiting[sequence.id] = sequence
        self._release(sequence)
        sequence.outbox.put_nowait(Preempted())

    def _release(self, sequence: Sequence) -> None:
        self._admission.makers.left(sequence)
        if sequence.lease is not None:
            sequence.lease = None
            self._ledger.release(sequence.id)
            self._line.memory_freed()

    def _next_step(self) -> list[Launched]:
        """Plan over the running sequences, oldest first, and take the memory for it; the youngest is
        preempted first."""
        self._shrink()
        rows = sorted(self._running.values(), key=lambda one: one.arrival)
        candidates = [
            Candidate(sequence_id=one.id, computed=one.computed, known=one.target, cut=one.next_cut)
            for one in rows
        ]
        planned = plan(candidates, self._limits.budget)
        planned.sort(key=lambda row: self._running[row[0]].arrival)
        reserved = [(sequence_id, n) for sequence_id, n in planned if self._reserve(sequence_id, n)]
        return [self._launch(self._running[sequence_id], n) for sequence_id, n in reserved]

    def _shrink(self) -> None:
        """Bring the memory down to its budget, at the cost of the youngest."""
        if not self._ledger.excess:
            return
        while self._ledger.excess and not self._ledger.resize(self._ledger.budget_extents) and self._running:
            self._ledger.counters["preemptions_for_resize"] += 1
            self._preempt(max(self._running.values(), key=lambda one: one.arrival))
        self._line.memory_freed()

    def _reserve(self, sequence_id: str, num_tokens: int) -> bool:
        """Make the lease hold `num_tokens` more, at the cost of younger requests. False when it was
        preempted, or when it is the only one and lacks memory that is still being fetched or published."""
        sequence = self._running.get(sequence_id)
        while sequence is not None and sequence.lease is not None:
            try:
                self._ledger.reserve(sequence.lease, sequence.computed + num_tokens)
            except OutOfMemory:
                victim = max(self._running.values(), key=lambda one: one.arrival)
                if len(self._running) == 1:
                    return False
                victim.preemptions += 1
                self._ledger.counters["preemptions"] += 1
                self._preempt(victim)
                sequence = self._running.get(sequence_id)
            else:
                return True
        return False

    def _launch(self, sequence: Sequence, num_tokens: int) -> Launched:
        assert sequence.lease is not None
        flight = self._ledger.launch(sequence.lease, sequence.computed + num_tokens)
        return Launched(sequence, sequence.lease, flight, _row(sequence, sequence.lease, flight))

    async def _run_step(self, step: list[Launched]) -> None:
        landed = 0
        try:
            drawn = await self._runner.run(tuple(one.row for one in step))
            for one, token in zip(step, drawn, strict=True):
                landed += 1
                self._ledger.land(one.lease, one.flight.end, one.sequence.keys)
                if one.lease.ended:
                    self._line.memory_freed()
                else:
                    self._advance(one.sequence, one.lease, one.flight, token)
        finally:
            for one in step[landed:]:  # the step broke, and nothing of it counts
                self._ledger.land(one.lease, one.flight.start, one.sequence.keys)

    def _advance(self, sequence: Sequence, lease: Lease, flight: Flight, token: int | None) -> None:
        """A row has landed and drawn `token`: keep the state where it is wanted, end."""
        depth = lease.committed
        self._ledger.counters["computed_tokens"] += flight.end - flight.start
        done = sequence.produces and depth == sequence.target
        if depth in sequence.cuts or depth in sequence.junctions:
            self._ledger.keep_state(lease, last=done)
            if not done and (
                depth in sequence.junctions or depth == sequence.boundary
            ):  # others will want it
                self._publications.publish(sequence, depth // sequence.page_tokens)
        elif depth % sequence.page_tokens == 0 and depth > len(sequence.request.tokens):
            self._checkpoint(sequence, lease)
        self._admission.makers.advanced(sequence, flight.start)
        if done:
            del self._running[sequence.id]
            sequence.outbox.put_nowait(Delta(tokens=()))
        elif token is not None:
            self._ledger.counters["generated_tokens"] += 1
            finish = sequence.draw(token)
            sequence.outbox.put_nowait(Delta(tokens=(token,), finish=finish))
            if finish is not None:
                self._publish_turn(sequence, lease)
                self._end(sequence)

    def _checkpoint(self, sequence: Sequence, lease: Lease) -> None:
        """A page boundary was passed while decoding."""
        limits = self._limits
        if limits.checkpoint_strategy == "none" and self._ledger.layout.hybrid:
            return
        pages = lease.committed // sequence.page_tokens
        if sequence.checkpoint_owed or pages % limits.checkpoint_interval == 0:
            sequence.checkpoint_owed = not self._ledger.roll_checkpoint(lease)

    def _publish_turn(self, sequence: Sequence, lease: Lease) -> None:
        """The next turn of this conversation will resume where this one ends, on whatever worker it lands."""
        if not self._ledger.layout.hybrid:
            if lease.entries:
                self._publications.publish(sequence, len(lease.entries))
        elif lease.rolling is not None and lease.rolling.checkpoint is not None:
            self._publications.publish(sequence, lease.rolling.depth_pages)


def _row(sequence: Sequence, lease: Lease, flight: Flight) -> Row:
    draws = not sequence.produces and flight.end == len(sequence.tokens)
    return Row(
        sequence_id=sequence.id,
        tokens=tuple(sequence.tokens[flight.start : flight.end]),
        start=flight.start,
        pages=tuple(lease.pages()),
        read=flight.read,
        write=flight.writes[-1] if flight.writes else None,
        sampling=sequence.request.sampling if draws else None,
    )
