"""The engine of a worker, for prefill and decode alike: takes requests and runs steps over them.

    request -> admit (memory, fetch) -> schedule -> Runner -> land (draw, commit, checkpoint) -> end

One asyncio loop owns everything here. Only the Runner and the store work elsewhere, on leased memory.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.engine.audit import Audit, OwnershipBroken
from tidemill.workers.engine.commit import StepCommitter
from tidemill.workers.engine.drain import Drain
from tidemill.workers.engine.intake import RequestIntake
from tidemill.workers.engine.load_report import load_of
from tidemill.workers.engine.pipeline import Pipeline
from tidemill.workers.engine.prefetcher import Prefetcher
from tidemill.workers.engine.publisher import Publisher
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.execution.step import Runner
from tidemill.workers.inbox import Emit, Pause, done, generated
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    RETAIN_S_MAX,
    Announcement,
    Delta,
    Produced,
    Provenance,
    Request,
    WorkerGone,
    WorkerLoad,
)
from tidemill.workers.scheduling.admission import Admission
from tidemill.workers.scheduling.admission_queue import AdmissionQueue
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.scheduler import Scheduler
from tidemill.workers.scheduling.sequence import IsolationNotice, Item, Preempted, Sequence
from tidemill.workers.scheduling.sequences import Sequences
from tidemill.workers.transfer.transfer import Transfer

REPORTED_S = 1.5
"""The time after which a heartbeat has reported a violation."""

LOOP_ENDED = "the worker's step loop has ended"

PROGRESS_CPU_S = 0.1
"""The CPU time of steps that counts as progress: in the 3 s after which a worker is lost, 3 % of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHooks:
    """The functions that the loop calls outside of it."""

    step_cpu_s: Callable[[], float] = float  # returns the CPU seconds that steps have used so far
    expert_pairs: Callable[[], list[int]] = list  # returns the load of each rank's experts
    publish_events: Callable[[], None] = lambda: None  # called between steps
    reserved_peak: Callable[[], int] = int  # returns the most bytes that torch has held of the device


class Engine:
    def __init__(
        self,
        ledger: Ledger,
        transfer: Transfer,
        runner: Runner,
        limits: EngineLimits,
        root_of: Callable[[str], PageKey],
        grammars: Grammars | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        """Create an engine. Without `grammars`, requests with a grammar are refused."""
        self.steps = 0  # iterations of the loop, with idle ones
        self._hooks = EngineHooks() if hooks is None else hooks
        self._limits = limits
        self._ledger = ledger
        self._transfer = transfer
        self._work = asyncio.Event()
        self._arrivals = RequestIntake(limits, ledger.layout, root_of, grammars, self._work.set)
        self._sequences = Sequences()
        admission_queue = AdmissionQueue()
        self._admission = Admission(ledger, transfer, admission_queue, self._sequences, limits, self._preempt)
        self._publisher = Publisher(ledger, transfer, admission_queue, lambda: self.num_requests)
        self._prefetcher = Prefetcher(ledger, transfer, admission_queue)
        self._pipeline = Pipeline(
            runner,
            Scheduler(ledger, limits, self._sequences, self._preempt),
            StepCommitter(ledger, limits, admission_queue, self._admission.in_progress, self._publisher),
            self._preempt,
            self._landed_last,
            self._hooks.step_cpu_s,
        )
        self._producing: dict[PageKey, asyncio.Lock] = {}
        self._drain = Drain(self._publisher, self._preempt)
        self._audit = Audit(self._check, lambda: len(ledger.index), ledger.counters)

    async def run(self) -> None:
        """Run steps until cancelled. When it breaks, every stream ends with WorkerGone."""
        try:
            while True:
                self.steps += 1
                self._drain.advance(self._sequences.running.values(), _now_s())
                self._ledger.retention.advance(_now_s())
                self._hooks.publish_events()
                stepped = await self._pipeline.step(self._limits.flights_max)
                if self._limits.audits:
                    self._audit.run(_now_s(), idle=not stepped)
                if stepped:
                    await asyncio.sleep(0)  # streams take their tokens before the next step
                    continue
                self._publisher.publish_grids()
                self._work.clear()
                try:
                    async with asyncio.timeout(self._limits.idle_interval_s):
                        await self._work.wait()
                except TimeoutError:
                    if self._limits.ranks > 1:
                        await self._pipeline.beat()
        except OwnershipBroken:
            await self._end_streams()
            self.steps += 1  # a heartbeat is sent, and reports the violation
            await asyncio.sleep(REPORTED_S)
            raise
        finally:
            await self._end_streams()

    async def _end_streams(self) -> None:
        self._sequences.closed = True
        for sequence in self._sequences:
            sequence.delivery.inbox.put(WorkerGone(LOOP_ENDED))
        await self._publisher.close()
        await self._pipeline.settle()

    def _check(self) -> None:
        """Check the ledger, and that each running sequence holds the memory that it runs on."""
        self._ledger.check()
        for sequence in self._sequences.running.values():
            assert sequence.lease is not None, "a running sequence has no memory"
            assert not sequence.lease.ended, "a running sequence has lost its memory"
        for sequence in self._sequences.waiting.values():
            assert not sequence.ended, "a sequence that has ended waits"

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        """Make the store hold every page below the prompt's last page boundary, and the checkpoint there.

        Idempotent: what the store already holds is not computed again. `depth` is less than requested when
        the store did not take everything.
        """
        self._drain.check(produces=True)
        sequence = self._arrivals.producing(request)
        keys = sequence.keys[: sequence.target // sequence.page_tokens]
        if not keys:
            return Produced(depth=0, provenance=Provenance())
        lock = self._producing.setdefault(keys[-1], asyncio.Lock())
        try:
            async with lock:  # the same prompt in two concurrent calls is published once
                if await self._transfer.holds(keys):
                    return Produced(
                        depth=sequence.target, provenance=Provenance(reused_tokens=sequence.target)
                    )
                began_s = _now_s()
                await self._run(sequence, lambda _: None, notify)
                await self._notify(sequence, notify, alone=False)
                computed_at_s = _now_s()
                sequence.time_since(began_s, computed_at_s)
                self._publisher.publish(sequence, len(keys))
                stored = await self._publisher.published(sequence, len(keys))
                sequence.time_stored(_now_s() - computed_at_s)
        finally:
            self._close(sequence)
            if not lock.locked():
                self._producing.pop(keys[-1], None)
        return Produced(depth=sequence.target if stored else 0, provenance=sequence.provenance)

    async def prefetch(self, request: Request) -> Produced:
        """Fetch the pages of the prompt as they appear in the store, until cancelled, for a later `generate`.
        Best effort: `depth` has the depth that was reached."""
        self._drain.check(produces=False)
        sequence = self._arrivals.producing(request)
        keys = sequence.keys[: sequence.target // sequence.page_tokens]
        depth = await self._prefetcher.run(request, keys) * sequence.page_tokens
        return Produced(depth=depth, provenance=Provenance(fetched_tokens=depth))

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        """Emit the tokens of `request`, one delta per step; cancelling this ends it. `notify` is for a
        request on trial: see workers/scheduling/isolation.py. Raises PagesMissing, RequestError, WorkerGone,
        HandedOver."""
        self._drain.check(produces=False, pools=request.pools)
        sequence = await self._arrivals.generating(request)
        sequence.restore.prefetched_pages = await self._prefetcher.take(request)
        try:
            await self._run(sequence, emit, notify)
        finally:
            self._close(sequence)

    def generate(self, request: Request, notify: Notify | None = None) -> AsyncGenerator[Delta]:
        """Yield what `stream` emits."""
        return generated(lambda emit: self.stream(request, emit, notify))

    def restrict(self, *, produces: bool, generates: bool) -> None:
        """Take only such calls from now on. Other calls end with HandedOver: new and waiting ones
        immediately, running ones when what they need elsewhere is stored."""
        self._drain.restrict(produces=produces, generates=generates, now_s=_now_s())
        for sequence in self._sequences.waiting.values():
            timeout = sequence.restore.timeout
            pools = sequence.request.pools
            if timeout is not None and not self._drain.takes(produces=sequence.produces, pools=pools):
                timeout.reschedule(_now_s())
        self._work.set()

    def resize(self, budget_bytes: int) -> None:
        """Change how much memory the worker may use. The minimum is one request of the longest kind, the
        maximum is the reservation. Cached objects go first, by value. Then running requests are preempted,
        the youngest first, before the next step."""
        extents = budget_bytes // (self._ledger.layout.extent_bytes * self._limits.ranks)
        self._ledger.resize(max(self._limits.extents_min, min(extents, self._ledger.num_extents)))
        self._admission.admission_queue.memory_freed()
        self._work.set()

    @property
    def progress(self) -> int:
        """Return a number that grows while the loop runs, or a step uses at least a part of a core. A step
        of a large model takes many seconds; one that neither ends nor uses CPU time is wedged."""
        return self.steps + int(self._pipeline.step_cpu_s() / PROGRESS_CPU_S)

    def release(self, tenant: str, name: str) -> None:
        """Drop what `tenant` retains under the session `name`."""
        self._ledger.retention.release(tenant, name)

    def load(self) -> WorkerLoad:
        return load_of(
            self._ledger,
            list(self._sequences.running.values()),
            list(self._sequences.waiting.values()),
            self._transfer,
            self._transfer.throughput.with_throughput(self._pipeline.speedometer.speed, _now_s()),
            self._limits,
            self.steps,
            self._hooks.expert_pairs(),
            self._hooks.reserved_peak(),
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        """Return the restorable depths that were added and removed since the last call, or all of them."""
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
        return len(self._sequences)

    async def drain_publications(self) -> None:
        """Wait until all publications in the background are stored or refused."""
        await self._publisher.drain()

    async def _run(self, sequence: Sequence, emit: Emit[Delta], notify: Notify | None) -> None:
        """Admit the sequence, again after each preemption, and emit what its steps bring. A producing one
        emits nothing and ends when its target is computed."""
        began_s = _now_s()
        begun = False

        def take(item: Item) -> Pause | None:
            nonlocal begun
            if not isinstance(item, Delta):
                return partial(self._act, sequence, item, notify)
            if sequence.produces:
                return done
            if item.finish is not None and sequence.isolation.alone:
                return partial(self._act, sequence, item, notify)
            if not begun:
                begun = True
                sequence.time_since(began_s, _now_s())
                item = replace(item, provenance=sequence.provenance)
            pause = emit(item)
            return pause if item.finish is None else done

        try:
            await self._admit(sequence)
        except TidemillError as error:
            self._audit.fault(f"{sequence.id} not admitted: {type(error).__name__}", _now_s())
            raise
        await sequence.delivery.inbox.read(take)

    async def _act(self, sequence: Sequence, item: Item, notify: Notify | None) -> None:
        """Carry out an item of a running sequence that is more than tokens."""
        if isinstance(item, IsolationNotice):
            alone = item.alone and sequence.id in self._sequences.running
            await self._notify(sequence, notify, alone=alone)
            sequence.isolation.is_notifying = False
            self._work.set()
            return
        await self._notify(sequence, notify, alone=False)
        match item:
            case Preempted():
                await self._admit(sequence)
            case Delta():
                sequence.delivery.inbox.put(item)  # the last one: it passes now
            case error:
                raise error

    async def _admit(self, sequence: Sequence) -> None:
        self._drain.check(produces=sequence.produces, pools=sequence.request.pools)
        self._sequences.wait(sequence)
        began_s = _now_s()
        try:
            async with asyncio.timeout(None) as sequence.restore.timeout:
                await self._admission.admit(sequence)
        except TimeoutError:
            self._drain.check(produces=sequence.produces, pools=sequence.request.pools)
            raise
        finally:
            sequence.restore.timeout = None
            sequence.restore.admission_s += _now_s() - began_s
        if sequence.computed == sequence.target:  # it produces, and all its pages were here
            self._sequences.drop(sequence)
            sequence.delivery.inbox.put(Delta(tokens=()))
            return
        if self._sequences.closed:
            raise WorkerGone(LOOP_ENDED)
        self._sequences.run(sequence)
        self._work.set()

    async def _notify(self, sequence: Sequence, notify: Notify | None, *, alone: bool) -> None:
        if sequence.isolation.alone is not alone:
            if notify is not None:
                await notify(alone)
            sequence.isolation.alone = alone
            self._work.set()

    def _landed_last(self, sequence: Sequence) -> None:
        """End a sequence that has computed all that was requested. A producing one still publishes it."""
        self._sequences.drop(sequence)
        if not sequence.produces:
            self._end(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Close the call: from now on no failure can be attributed to it."""
        self._end(sequence)
        isolation = sequence.isolation
        if isolation.alone or isolation.is_notifying:
            isolation.alone = isolation.is_notifying = False
            self._work.set()

    def _end(self, sequence: Sequence) -> None:
        """Release all that the sequence holds. This is the only place that does."""
        if sequence.lease is not None and sequence.computed < sequence.end - 1:
            event = f"{sequence.id} ended at {sequence.computed} of {sequence.end} tokens"
            self._audit.fault(event, _now_s())
        if sequence.lease is not None and not sequence.ended:
            self._admission.texts.add(sequence)
        sequence.ended = True
        self._retain(sequence)
        self._sequences.drop(sequence)
        self._release(sequence)
        sequence.sampling_state.close()

    def _retain(self, sequence: Sequence) -> None:
        """Let the tenant pay for keeping what the sequence computed, if the request asks for it."""
        request, lease = sequence.request, sequence.lease
        retain_s = min(request.retain_s, RETAIN_S_MAX)
        if lease is not None and retain_s > 0:
            depths = {depth // sequence.page_tokens for depth in sequence.restore.wanted}
            self._ledger.retention.retain(
                request.tenant, request.session, lease.shared_entries, retain_s, depths
            )

    def _preempt(self, sequence: Sequence, error: Exception | None = None) -> None:
        """Take the memory of a running sequence. It is admitted again, with its pages still restorable; or
        its stream ends with `error`."""
        if error is not None:
            self._audit.fault(f"{sequence.id} broke: {type(error).__name__}", _now_s())
        self._sequences.wait(sequence)
        self._release(sequence)
        sequence.delivery.inbox.put(error or Preempted())

    def _release(self, sequence: Sequence) -> None:
        self._admission.in_progress.left(sequence)
        if sequence.lease is not None:
            sequence.lease = None
            self._ledger.release(sequence.id)
            self._admission.admission_queue.memory_freed()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
