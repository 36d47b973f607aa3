"""The engine of a worker, for prefill and decode alike: takes requests and runs steps over them.

    request -> admit (memory, fetch) -> plan -> Runner -> advance (commit, draw, checkpoint) -> end

One asyncio loop owns everything here; only the Runner and the store work elsewhere, on memory that is leased.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.ledger import Lease, Ledger
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
from tidemill.workers.restore import Admission
from tidemill.workers.sequence import Preempted, Sequence, sequence_of
from tidemill.workers.step import Row, Runner
from tidemill.workers.transfer import Transfer

IDLE_TURN_S = 0.1
LOOP_ENDED = "the worker's step loop has ended"
PUBLICATIONS_MAX = 64
"""Publications in the background at once; publishing is best effort, and each one holds its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`capacity_tokens` is the longest sequence that the memory can hold when nothing else is running."""

    budget: Budget
    capacity_tokens: int


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
        self._admission = Admission(ledger, transfer)
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._waiting: dict[str, Sequence] = {}
        self._producing: dict[PageKey, asyncio.Lock] = {}
        self._publications: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._serial = 0
        self._over = False  # the step loop has ended: nobody would run what is admitted now
        self._counters: Counter[str] = Counter()

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
            async with lock:  # the same prompt twice at once: the second one finds it stored
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

    def load(self) -> WorkerLoad:
        usage = self._ledger.usage()
        layout = self._ledger.layout
        rows = [*self._running.values(), *self._waiting.values()]
        taken_bytes = usage.pages_taken * layout.page_bytes + usage.states_taken * layout.state_stride_bytes
        live_bytes = self._ledger.live_bytes()
        budget_bytes = layout.extent_bytes * (usage.page_extents + usage.state_extents + usage.empty_extents)
        stats = self._transfer.store.stats()
        return WorkerLoad(
            queued_tokens=sum(sequence.target - sequence.computed for sequence in rows),
            running_rows=len(self._running),
            waiting_rows=len(self._waiting),
            live_bytes=live_bytes,
            cached_bytes=taken_bytes - live_bytes,
            free_bytes=budget_bytes - taken_bytes,
            page_bytes=usage.page_extents * layout.extent_bytes,
            state_bytes=usage.state_extents * layout.extent_bytes,
            counters={
                **self._counters,
                **self._ledger.counters,
                "steps": float(self.steps),
                "store_hits": stats.hits,
                "store_misses": stats.misses,
                "store_corrupt": stats.corrupt,
                "store_refused": stats.refused,
                "store_put_bytes": stats.put_bytes,
                "store_get_bytes": stats.get_bytes,
            },
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
        while self._publications:
            await asyncio.wait(self._publications)

    def _sequence(self, request: Request, *, produces: bool) -> Sequence:
        self._serial += 1
        return sequence_of(
            f"{request.request_id}#{self._serial}",
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
        """Release all that the sequence holds: the one place, whatever ended it, once no step uses it."""
        sequence.ended = True
        self._running.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        if sequence.lease is not None and not sequence.in_step:
            sequence.lease = None
            self._ledger.release(sequence.id)
            self._admission.memory_freed()

    def _preempt(self, sequence: Sequence) -> None:
        """Take the memory of a running sequence; its pages stay restorable, it is admitted again."""
        assert not sequence.in_step
        self._counters["preemptions"] += 1
        del self._running[sequence.id]
        self._waiting[sequence.id] = sequence
        sequence.lease = None
        self._ledger.release(sequence.id)
        self._admission.memory_freed()
        sequence.outbox.put_nowait(Preempted())

    def _next_step(self) -> list[tuple[Sequence, Row]]:
        """Plan over the running sequences and take the memory for it; the youngest is preempted first."""
        candidates = [
            Candidate(
                sequence_id=sequence.id,
                computed=sequence.computed,
                known=sequence.target,
                cut=sequence.next_cut,
            )
            for sequence in self._running.values()
        ]
        step: list[tuple[Sequence, Row]] = []
        for sequence_id, num_tokens in plan(candidates, self._limits.budget):
            sequence = self._running.get(sequence_id)
            if sequence is not None and self._reserve(sequence, sequence.computed + num_tokens):
                sequence.in_step = True
                step.append((sequence, _row(sequence, num_tokens)))
        return step

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the lease hold `num_tokens`, at the cost of younger ones; False when itself preempted."""
        assert sequence.lease is not None
        while True:
            try:
                self._ledger.reserve(sequence.lease, num_tokens)
            except OutOfMemory:
                victim = [one for one in self._running.values() if not one.in_step][-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                return True

    async def _run_step(self, step: list[tuple[Sequence, Row]]) -> None:
        try:
            drawn = await self._runner.run(tuple(row for _, row in step))
        finally:
            for sequence, _ in step:
                sequence.in_step = False
                if sequence.ended:  # while the step was using its memory
                    self._end(sequence)
        for (sequence, row), token in zip(step, drawn, strict=True):
            if not sequence.ended:
                self._advance(sequence, len(row.tokens), token)

    def _advance(self, sequence: Sequence, num_tokens: int, token: int | None) -> None:
        """The step has written `num_tokens` more and drawn `token`: commit, keep the state where it is
        wanted, end."""
        lease = sequence.lease
        assert lease is not None
        depth = lease.committed + num_tokens
        self._ledger.commit(lease, depth, sequence.keys)
        self._counters["computed_tokens"] += num_tokens
        done = sequence.produces and depth == sequence.target
        if depth in sequence.cuts:
            self._ledger.keep_state(lease, last=done)
            if not done and depth in (sequence.junction, sequence.boundary):  # others will want it
                self._publish(sequence, depth // sequence.page_tokens)
        elif depth % sequence.page_tokens == 0 and depth > len(sequence.request.tokens):
            self._ledger.roll_checkpoint(lease)
        if done:
            del self._running[sequence.id]
            sequence.outbox.put_nowait(Delta(tokens=()))
        elif token is not None:
            self._counters["generated_tokens"] += 1
            finish = sequence.draw(token)
            sequence.outbox.put_nowait(Delta(tokens=(token,), finish=finish))
            if finish is not None:
                self._publish_turn(sequence, lease)
                self._end(sequence)

    def _publish_turn(self, sequence: Sequence, lease: Lease) -> None:
        """The next turn of this conversation will resume where this one ends, on whatever worker it lands."""
        if not self._ledger.layout.hybrid:
            if lease.entries:
                self._publish(sequence, len(lease.entries))
        elif lease.rolling is not None and lease.rolling.checkpoint is not None:
            self._publish(sequence, lease.rolling.depth_pages)

    def _publish(self, sequence: Sequence, num_pages: int) -> None:
        """Store the first pages of the sequence and the checkpoint at their end, in the background."""
        if len(self._publications) >= PUBLICATIONS_MAX:
            self._counters["publications_skipped"] += 1
            return
        assert sequence.lease is not None
        self._serial += 1
        lease_id = f"{sequence.id}/publish#{self._serial}"
        lease = self._ledger.share(lease_id, sequence.lease, num_pages)
        keys = sequence.keys[:num_pages]

        async def publish() -> None:
            try:
                await self._transfer.publish(lease, keys)
            finally:
                self._ledger.release(lease_id)
                self._admission.memory_freed()

        task = asyncio.create_task(publish())
        self._publications.add(task)
        task.add_done_callback(self._publications.discard)


def _row(sequence: Sequence, num_tokens: int) -> Row:
    lease = sequence.lease
    assert lease is not None
    start = lease.committed
    draws = not sequence.produces and start + num_tokens == len(sequence.tokens)
    return Row(
        sequence_id=sequence.id,
        tokens=tuple(sequence.tokens[start : start + num_tokens]),
        start=start,
        pages=tuple(lease.pages()),
        read=lease.read_state,
        write=lease.state,
        sampling=sequence.request.sampling if draws else None,
    )
