"""The engine of tests: it has no model, but answers that follow from the prompts, and a capacity.

Its steps run in `run`. Where nothing runs them, a test puts out the items of calls by `step`.
"""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

from tests.support.waits import WAIT_S_MAX
from tidemill.cluster.settings import WorkerSettings
from tidemill.workers.contract.engine import RunningEngine
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import (
    NO_MEMORY,
    Announcement,
    Delta,
    EngineInfo,
    HandedOver,
    Pooling,
    Produced,
    Provenance,
    Request,
    Role,
    Speed,
    WorkerLoad,
)
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.settings import EngineSettings

STEP_S = 0.02
ROWS_MAX = 1 << 20
PAGE_TOKENS = 64
FIRST_TOKEN, NUM_TOKENS = 100, 700
BREAK_TOKEN = 1 << 20
"""A prompt that ends with it breaks the step loop."""

Kind = Literal["generate", "produce", "prefetch"]
Item = Delta | Produced | Exception


def answer(prompt: tuple[int, ...], index: int) -> int:
    """Return token `index` of the answer, wherever and however often it is asked for."""
    return FIRST_TOKEN + (sum(prompt) + 7 * index) % NUM_TOKENS


def pooled(prompt: tuple[int, ...]) -> bytes:
    """Return what the model pools: four numbers."""
    return struct.pack("<4f", *(float(1 + sum(prompt[index::4])) for index in range(4)))


def depth_of(prompt: Request) -> int:
    return (len(prompt.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS


@dataclass(eq=False, kw_only=True)
class Call:
    """A call that is open, with the items that its caller has not read yet."""

    kind: Kind
    request: Request
    notify: Notify | None
    seniority: float
    left: float  # prompt tokens to be computed
    drawn: int = 0
    ended: bool = False
    items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue[Item])

    @property
    def waits(self) -> bool:
        return not self.drawn and not self.ended

    @property
    def runs(self) -> bool:
        return self.drawn > 0 and not self.ended

    async def next(self) -> Delta | Produced:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def draw(self) -> None:
        request = self.request
        if request.tokens[-1] == BREAK_TOKEN:
            raise RuntimeError("the step loop met its breaking point")
        if request.pools:
            self.drawn, self.ended = 1, True
            computed = Provenance(computed_tokens=len(request.tokens))
            numbers = pooled(request.tokens)
            self.items.put_nowait(Delta(tokens=(), finish="stop", pooled=numbers, provenance=computed))
            return
        prompt = request.tokens[: len(request.tokens) - request.drawn]
        token = answer(prompt, request.drawn + self.drawn)
        self.drawn += 1
        self.ended = self.drawn == request.max_new_tokens
        computed = Provenance(computed_tokens=len(request.tokens)) if self.drawn == 1 else None
        finish = "length" if self.ended else None
        self.items.put_nowait(Delta(tokens=(token,), finish=finish, provenance=computed))

    def end(self) -> None:
        depth, self.ended = depth_of(self.request), True
        computed = depth if self.kind == "produce" else 0
        provenance = Provenance(computed_tokens=computed, fetched_tokens=depth - computed)
        self.items.put_nowait(Produced(depth=depth, provenance=provenance))


class FakeEngine:
    """Computes prompts in order of seniority, `tokens_per_s` by the clock however late its steps are, and
    draws a token a step for each of `rows_max` rows."""

    def __init__(self, tokens_per_s: float = inf, rows_max: int = ROWS_MAX, memory_bytes: int = 0) -> None:
        self.steps = self.taken = 0
        self.begun: list[Kind] = []
        self.released: list[tuple[str, str]] = []
        self._rate, self._rows_max, self._memory_bytes = tokens_per_s, rows_max, memory_bytes
        self._open: dict[Call, None] = {}
        self._credit = 0.0
        self._produces = self._generates = True
        self._changed = asyncio.Event()

    @property
    def calls(self) -> dict[str, Call]:
        """The open calls by the ids of their requests."""
        return {call.request.request_id: call for call in self._open}

    @property
    def progress(self) -> int:
        return self.steps

    def step(self, *items: tuple[str, Item]) -> None:
        """Put out items of the test together, as a step does."""
        for request_id, item in items:
            self.calls[request_id].items.put_nowait(item)

    async def until(self, holds: Callable[["FakeEngine"], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    async def run(self) -> None:
        now_s = asyncio.get_running_loop().time
        before_s = now_s()
        while True:
            await asyncio.sleep(STEP_S)
            self._credit += (now_s() - before_s) * self._rate
            before_s = now_s()
            self.steps += 1
            for call in [call for call in self._open if call.runs]:
                call.draw()
            self._compute()

    def _compute(self) -> None:
        rows = sum(call.runs for call in self._open)
        for call in sorted((call for call in self._open if call.waits), key=lambda call: call.seniority):
            taken = min(self._credit, call.left)
            call.left -= taken
            self._credit -= taken
            if call.left > 0:
                return
            if call.kind != "generate":
                call.end()
            elif rows < self._rows_max:
                call.draw()
                rows += call.runs
        self._credit = 0.0  # unused time is lost

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        self._check(takes=self._produces)
        return await self._produced("produce", request, notify, depth_of(request))

    async def prefetch(self, request: Request) -> Produced:
        return await self._produced("prefetch", request, None, 0)

    async def _produced(self, kind: Kind, request: Request, notify: Notify | None, tokens: int) -> Produced:
        call = self._begin(kind, request, notify, tokens)
        try:
            item = await call.next()
            assert isinstance(item, Produced)
            return item
        finally:
            self._leave(call)

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        self._check(takes=self._generates or (request.pools and self._produces))
        tail = len(request.tokens) if request.gap_tokens_max is None else 1
        call = self._begin("generate", request, notify, tail)
        try:
            while True:
                item = await call.next()
                assert isinstance(item, Delta)
                emit(item)
                if item.finish is not None:
                    return
        finally:
            self._leave(call)

    def _begin(self, kind: Kind, request: Request, notify: Notify | None, tokens: int) -> Call:
        came_s = asyncio.get_running_loop().time() + 10.0 * request.priority + request.queue_offset_s
        seniority = -inf if kind == "prefetch" else came_s
        call = Call(kind=kind, request=request, notify=notify, seniority=seniority, left=tokens)
        self._open[call] = None
        self.begun.append(kind)
        self.taken += kind != "prefetch"
        self._changed.set()
        return call

    def _leave(self, call: Call) -> None:
        del self._open[call]
        self._changed.set()

    def release(self, tenant: str, name: str) -> None:
        self.released.append((tenant, name))
        self._changed.set()

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self._produces, self._generates = produces, generates
        takes = {"generate": generates, "produce": produces, "prefetch": True}
        for call in self._open:
            if not (takes[call.kind] or (call.request.pools and produces)):
                call.items.put_nowait(_handed_over())

    def _check(self, *, takes: bool) -> None:
        if not takes:
            raise _handed_over()

    async def drain_publications(self) -> None:
        """It stores nothing."""

    def load(self) -> WorkerLoad:
        waiting = [call for call in self._open if call.waits]
        running, queued = sum(call.runs for call in self._open), sum(call.left for call in waiting)
        live_bytes = self._memory_bytes * running // self._rows_max
        return WorkerLoad(
            queued_tokens=int(queued),
            queued_s=queued / self._rate,
            running_rows=running,
            waiting_rows=len(waiting),
            memory=NO_MEMORY | {"pages_live": live_bytes, "free": self._memory_bytes - live_bytes},
            budget_bytes=self._memory_bytes,
            speed=Speed(step_s=1e-6, token_s=1 / self._rate) if isfinite(self._rate) else Speed(),
            counters={"steps": float(self.steps), "taken": float(self.taken)},
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        return Announcement(full=full)

    def resize(self, budget_bytes: int) -> None:
        assert self._memory_bytes, f"it has no memory, and was assigned {budget_bytes} bytes"


def _handed_over() -> HandedOver:
    return HandedOver("ordered to leave it to others")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBuilt:
    engine: RunningEngine
    info: EngineInfo
    group: None = None


def worker(name: str, role: Role, **settings: Any) -> WorkerSettings:  # noqa: ANN401 - by name
    """Return a worker with this engine. `max_num_batched_tokens` is its prompt tokens in a second."""
    given: dict[str, Any] = {
        "model_folder": Path("none"),
        "cache_folder": Path("none"),
        "store_url": "memory:",
    }
    given |= {"memory_bytes": 0} | settings
    engine = EngineSettings(**given)
    return WorkerSettings(name=name, role=role, engine=engine, build=f"{__name__}:build")


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> FakeBuilt:
    del start_ranks
    progress(1, 2)
    progress(2, 2)
    memory_bytes = settings.memory_bytes or 0
    facts = EngineInfo(
        fingerprint="fake",
        layout="none",
        page_bytes=1,
        max_model_len=4096,
        vocab_size=FIRST_TOKEN + NUM_TOKENS,
        eos_token_ids=(1,),
        pooling=Pooling(kind="embed", size=4) if settings.runner == "pooling" else None,
        device="cpu",
        memory_bytes=memory_bytes,
        memory_floor_bytes=memory_bytes,
        memory_max_bytes=memory_bytes,
    )
    engine = FakeEngine(
        settings.max_num_batched_tokens or inf, settings.max_num_seqs or ROWS_MAX, memory_bytes
    )
    return FakeBuilt(engine=engine, info=facts)
