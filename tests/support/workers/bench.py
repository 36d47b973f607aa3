"""One engine around the fake model of the simulator, in virtual time, that must end with all memory back."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import pytest

from tests.support.sim.fold import (
    VOCABULARY,
    Broke,
    FoldRunner,
    expected,
    expected_scores,
    fold_layout,
    sound,
)
from tests.support.sim.in_order import InOrder
from tests.support.sim.loop import simulate
from tests.support.sim.watched import WatchedEngine
from tests.support.workers import late
from tests.support.workers.late import LateRunner
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId, WindowId
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Backing, Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.demand import FailAllocation, never
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import PageStore
from tidemill.workers.engine.engine import EngineHooks
from tidemill.workers.engine.memory_plan import capacity_tokens
from tidemill.workers.execution.step import Drawn, Runner, Step
from tidemill.workers.messages import Delta, Provenance, Request, Sampling, TokenLogprob, WorkerGone
from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

StoreT = TypeVar("StoreT", bound=PageStore)

VIRTUAL_S_MAX = 10_000.0
SETTLE_S_MAX = 60.0
STORE_BYTES = 1 << 20
LOOK_S = 0.001
"""Less than a step takes, mostly."""
HYBRID = fold_layout(4, hybrid=True)
ATTENTION_ONLY = fold_layout(4, hybrid=False)
WINDOWS = fold_layout(4, hybrid=False, window=7)
TIGHT = fold_layout(4, hybrid=True, extent_bytes_min=1)
"""One state or one page in an extent."""

LAYOUTS = pytest.mark.parametrize(
    "layout", [HYBRID, ATTENTION_ONLY, WINDOWS], ids=["hybrid", "attention", "windows"]
)
UNWINDOWED = pytest.mark.parametrize("layout", [HYBRID, ATTENTION_ONLY], ids=["hybrid", "attention"])
OVERLAPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Memory in extents: `extents_min` is the floor, `extents_max` what is reserved; 0 is `num_extents`."""

    extents_min: int = 0
    extents_max: int = 0
    interval: int = 1
    overlap: bool = True
    drafts_max: int = 0
    mtp: bool = False  # the runner guesses
    vocabulary: int = VOCABULARY
    rows_max: int = 8
    policy: Policy = "value"
    checkpoints_per_path: int = 16
    step_s_max: float = 0.02
    refuses: FailAllocation = never
    breaks: Callable[[Step], Exception | None] = sound
    wraps: bool = True  # the runner is watched
    step_cpu_s: Callable[[], float] = float
    backing: Callable[[int], Backing] = Fixed
    late_s_max: float = 0.0  # steps answer up to this time after their end


class Watched:
    """A runner that remembers its steps and what they drew, and holds them while the gate is closed. No row
    of a step, or of the one in flight, may touch what another sequence writes."""

    def __init__(self, runner: Runner, page_tokens: int, *, answers_late: bool = False) -> None:
        self.steps: list[Step] = []
        self.drawn: list[list[Drawn]] = []
        self.in_flight: list[Step] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._runner = runner
        self._page_tokens = page_tokens
        self._answers_late = answers_late
        self._order = InOrder[list[Drawn]]()
        self._launches = InOrder[list[Awaitable[list[Drawn]]]]()

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        assert step, "an empty step"
        assert len({row.sequence_id for row in step}) == len(step)
        self.steps.append(step)
        self.in_flight.append(step)
        self._check_writes()
        # One that answers late gets a step before the one before it has answered.
        launched = self._launches.add(lambda: self._launch(step)) if self._answers_late else None
        return self._order.add(lambda: self._run(step, launched))

    async def _launch(self, step: Step) -> list[Awaitable[list[Drawn]]]:
        await self.gate.wait()
        return [self._runner.run(step)]

    async def _run(
        self, step: Step, launched: asyncio.Future[list[Awaitable[list[Drawn]]]] | None
    ) -> list[Drawn]:
        try:
            (answer,) = await (launched or self._launch(step))
            drawn = await answer
            self.drawn.append(drawn)
            return drawn
        finally:
            self.in_flight.pop(0)

    def _check_writes(self) -> None:
        size = self._page_tokens
        pages: dict[PageId, str] = {}  # by what is written, who writes it
        windows: dict[WindowId, str] = {}
        slots: dict[StateId, str] = {}
        rows = [row for step in self.in_flight for row in step]
        for row in rows:
            written = row.pages[row.start // size : -(-row.end // size)]
            assert len(written) * size >= row.end - row.start, "tokens without a page"
            written_slots = [state for _, state in row.writes]
            assert len(set(written_slots)) == len(written_slots)
            pages |= dict.fromkeys(written, row.sequence_id)
            windows |= dict.fromkeys(row.windows[row.start // size :], row.sequence_id)
            slots |= dict.fromkeys(written_slots, row.sequence_id)
        for row in rows:
            holds = (*(state for _, state in row.writes), *([] if row.read is None else [row.read]))
            mine = {row.sequence_id}
            assert {pages[page] for page in pages.keys() & row.pages} <= mine, "a page of another sequence"
            assert {windows[window] for window in windows.keys() & row.windows[row.start // size :]} <= mine
            assert {slots[slot] for slot in slots.keys() & holds} <= mine, "a slot of another sequence"


@dataclass(frozen=True)
class Bench:
    """An engine whose step loop runs, and everything in it."""

    engine: WatchedEngine
    ledger: Ledger
    store: PageStore
    layout: Layout
    runner: Watched
    loop: asyncio.Task[None]
    vocabulary: int = VOCABULARY

    async def answer(self, request: Request) -> Provenance:
        """Generate to the end, check every token, and return the sources of the prompt."""
        got: list[int] = []
        scores: list[TokenLogprob] = []
        deltas: list[Delta] = []
        async with aclosing(self.engine.generate(request)) as stream:
            async for delta in stream:
                assert not (got and delta.prompt_logprobs), "the prompt comes first"
                got += delta.tokens
                scores += delta.prompt_logprobs
                deltas.append(delta)
        assert scores == expected_scores(
            request, hybrid=self.layout.has_states, window=self.layout.window_tokens
        )
        assert got == self.expected(request)
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        provenance = deltas[0].provenance
        assert provenance is not None
        assert all(delta.provenance is None for delta in deltas[1:])
        return provenance

    async def read(self, request: Request) -> list[Delta]:
        """Generate to the end, and check nothing."""
        async with aclosing(self.engine.generate(request)) as deltas:
            return [delta async for delta in deltas]

    def expected(self, request: Request) -> list[int]:
        layout = self.layout
        return expected(
            request, hybrid=layout.has_states, vocabulary=self.vocabulary, window=layout.window_tokens
        )

    async def answer_all(self, requests: Iterable[Request]) -> list[Provenance]:
        """Answer all concurrently, in this order of arrival, and check the memory while they run."""
        work = [asyncio.create_task(self.answer(request)) for request in requests]
        while not all(task.done() for task in work):
            self.ledger.check()
            await asyncio.wait(work, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in work):
                for task in work:
                    task.cancel()
        return await asyncio.gather(*work)

    async def until(self, met: Callable[[], bool]) -> None:
        """Look often, in virtual time."""
        while True:
            if met():
                return
            await asyncio.sleep(LOOK_S)

    def count(self, counter: str) -> int:
        return int(self.engine.load().counters.get(counter, 0))

    @property
    def idle_turns(self) -> int:
        """Turns of the step loop in which nothing ran."""
        return self.engine.steps - len(self.runner.steps)

    async def settle(self) -> None:
        """Wait for the steps and publications of requests that have ended."""
        async with asyncio.timeout(SETTLE_S_MAX):
            while self.ledger.num_leases:
                await self.engine.drain_publications()
                await asyncio.sleep(0.01)
        self.ledger.check()
        usage = self.ledger.usage()
        assert not any(usage.pinned.values())


@asynccontextmanager
async def bench(
    store: PageStore | None = None,
    *,
    layout: Layout = HYBRID,
    num_extents: int = 64,
    tokens_max: int = 0,
    runner: Runner | None = None,
    strategy: CheckpointStrategy = "lazy",
    tuning: Tuning | None = None,
) -> AsyncGenerator[Bench]:
    tuning = tuning or Tuning()
    page_tokens, rows_max = layout.page_tokens, tuning.rows_max
    reserved, extents_min = tuning.extents_max or num_extents, tuning.extents_min or num_extents
    backing = tuning.backing(layout.extent_bytes * reserved)
    memory = backing.memory.numpy().data
    arena = Arena(layout, reserved, backing, num_extents)
    cache = Cache(layout, arena, PrefixIndex(layout, tuning.policy))
    ledger = Ledger(cache, tuning.checkpoints_per_path, tuning.refuses)
    store = a_store() if store is None else store
    guesses_max = tuning.drafts_max * tuning.mtp
    fold = FoldRunner(
        layout, memory, Random(0), tuning.step_s_max, tuning.vocabulary, tuning.breaks, guesses_max
    )
    late_s_max = tuning.late_s_max or late.ALWAYS_S_MAX
    answers = LateRunner(fold, Random(1), late_s_max) if late_s_max else fold
    watched = Watched(runner or answers, page_tokens, answers_late=late_s_max > 0)
    carries_out = watched if tuning.wraps or runner is None else runner
    tokens_max = max(tokens_max, rows_max + page_tokens)
    engine = WatchedEngine(
        ledger,
        Transfer(layout, DirectIO(store, memory)),
        carries_out,
        EngineLimits(
            budget=Budget(tokens_max=tokens_max, rows_max=rows_max, page_tokens=page_tokens),
            capacity_tokens=capacity_tokens(layout, extents_min, tokens_max * (1 + tuning.overlap)),
            extents_min=extents_min,
            checkpoint_strategy=strategy,
            checkpoint_interval=tuning.interval,
            overlap=tuning.overlap,
            drafts_max=tuning.drafts_max,
            mtp=tuning.mtp,
        ),
        root_of,
        hooks=EngineHooks(step_cpu_s=tuning.step_cpu_s),
    )
    loop = asyncio.create_task(engine.run())
    made = Bench(engine, ledger, store, layout, watched, loop, tuning.vocabulary)
    try:
        async with asyncio.timeout(VIRTUAL_S_MAX):
            yield made
            await made.settle()
            assert engine.num_requests == 0
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError, Broke, WorkerGone):
            await loop


async def stored(store: StoreT, *requests: Request, layout: Layout = HYBRID) -> StoreT:
    """Let a worker produce the prompts, one after the other. Return the store."""
    async with bench(store, layout=layout) as one:
        for request in requests:
            await one.engine.produce(request)
    return store


class BrokenRunner:
    """Breaks with its step number `last`, and with all after it."""

    def __init__(self, last: int, error: Callable[[], Exception] = WorkerGone) -> None:
        self._left = last
        self._error = error

    async def run(self, step: Step) -> list[Drawn]:
        await asyncio.sleep(1.0)
        self._left -= 1
        if self._left <= 0:
            raise self._error()
        return [Drawn() if row.sampling_state is None else Drawn((0,)) for row in step]


def a_store() -> MemoryStore:
    return MemoryStore(STORE_BYTES)


def root_of(salt: str) -> PageKey:
    return Namespace(model="fold", layout="", salt=salt).root()


def prompt(num_tokens: int, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(vocabulary) for _ in range(num_tokens))


def a_request(tokens: tuple[int, ...], max_new_tokens: int = 6, **changes: str | int) -> Request:
    gap = changes.get("gap_tokens_max")
    return Request(
        request_id=str(changes.get("request_id", "r")),
        tokens=tokens,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(seed=1),
        salt=str(changes.get("salt", "")),
        gap_tokens_max=None if gap is None else int(gap),
        priority=int(changes.get("priority", 0)),
    )


def run(main: Coroutine[None, None, None], seed: int = 0) -> None:
    simulate(seed, main)


IN_VIRTUAL_TIME = pytest.mark.run_with.with_args(run)
"""The mark of files whose tests are coroutines for `run`."""
