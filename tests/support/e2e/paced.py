"""A real server whose engines have no model but a capacity: prompt tokens per second, and rows.

python -m tests.support.e2e.paced '{"workers": {"mixed-0": "mixed"}, "tokens_per_s": 300,
"rows_max": 32}'
"""

import asyncio
import json
import os
import secrets
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from tests.support.e2e.fake_engine import FakeBuilt
from tidemill.cluster.messages import Bounds, Hysteresis, TokenSink
from tidemill.cluster.settings import (
    ClusterSettings,
    FleetSettings,
    RouterSettings,
    WorkerSettings,
    ray_environ,
)
from tidemill.workers.messages import (
    Announcement,
    Delta,
    EngineInfo,
    HandedOver,
    MemoryUse,
    Produced,
    Provenance,
    Request,
    Speed,
    WorkerLoad,
)
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.settings import STEP, EngineSettings

KEEPER = Path(__file__).parents[3] / "workers" / "models" / "keeper"
STEP_S = 0.02
MEMORY_BYTES = 1 << 30
EOS = 1
FIRST_TOKEN, NUM_TOKENS = 100, 700


def answer(prompt: tuple[int, ...], index: int) -> int:
    """Token `index` of the answer, wherever and however often it is asked for."""
    return FIRST_TOKEN + (sum(prompt) + 7 * index) % NUM_TOKENS


@dataclass(eq=False)
class Row:
    request: Request
    seniority: float
    left: float  # prompt tokens to be computed
    drawn: int = 0
    outbox: asyncio.Queue[Delta | HandedOver | None] = field(
        default_factory=asyncio.Queue[Delta | HandedOver | None]
    )

    @property
    def produces(self) -> bool:
        return self.request.max_new_tokens == 0

    async def next(self) -> Delta | None:
        """None: the prompt is computed, and that was all. Raises HandedOver."""
        item = await self.outbox.get()
        if isinstance(item, HandedOver):
            raise item
        return item

    def draw(self) -> bool:
        """Put the next token out; whether it was the last."""
        request = self.request
        prompt = request.tokens[: len(request.tokens) - request.drawn]
        token = answer(prompt, request.drawn + self.drawn)
        self.drawn += 1
        is_last = self.drawn == request.max_new_tokens
        computed = Provenance(computed_tokens=len(request.tokens)) if self.drawn == 1 else None
        self.outbox.put_nowait(
            Delta(tokens=(token,), finish="length" if is_last else None, provenance=computed)
        )
        return is_last


class PacedEngine:
    """Computes prompts in order of seniority, `tokens_per_s` by the clock however late its steps are."""

    def __init__(self, tokens_per_s: float, rows_max: int) -> None:
        self.steps = 0
        self.taken = 0
        self._rate = tokens_per_s
        self._rows_max = rows_max
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._credit = 0.0
        self._produces = self._generates = True

    @property
    def progress(self) -> int:
        return self.steps

    async def run(self) -> None:
        now_s = asyncio.get_running_loop().time
        before_s = now_s()
        while True:
            await asyncio.sleep(STEP_S)
            self._credit += (now_s() - before_s) * self._rate
            before_s = now_s()
            self.steps += 1
            self._running = [row for row in self._running if not row.draw()]
            self._compute()

    def _compute(self) -> None:
        self._waiting.sort(key=lambda row: row.seniority)
        for row in list(self._waiting):
            taken = min(self._credit, row.left)
            row.left -= taken
            self._credit -= taken
            if row.left > 0:
                return
            if row.produces:
                row.outbox.put_nowait(None)
            elif len(self._running) >= self._rows_max:
                continue
            elif not row.draw():
                self._running.append(row)
            self._waiting.remove(row)
        self._credit = 0.0  # unused time is lost

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        del notify
        self._check(takes=self._produces)
        depth = (len(request.tokens) - 1) // 64 * 64
        row = self._enter(request, depth, produces=True)
        try:
            await row.next()
        finally:
            self._leave(row)
        return Produced(depth=depth, provenance=Provenance(computed_tokens=depth))

    def release(self, tenant: str, name: str) -> None:
        del tenant, name

    async def prefetch(self, request: Request) -> Produced:
        return Produced(depth=0, provenance=Provenance(fetched_tokens=len(request.tokens) - 1))

    async def generate(
        self, request: Request, notify: Notify | None = None, sink: TokenSink | None = None
    ) -> AsyncGenerator[Delta]:
        del notify, sink
        self._check(takes=self._generates)
        tail = len(request.tokens) if request.gap_tokens_max is None else 1
        row = self._enter(request, tail, produces=False)
        try:
            while True:
                delta = await row.next()
                assert delta is not None
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._leave(row)

    def _enter(self, request: Request, num_tokens: int, *, produces: bool) -> Row:
        came_s = asyncio.get_running_loop().time() + 10.0 * request.priority + request.queue_offset_s
        if produces:
            request = Request(request_id=request.request_id, tokens=request.tokens, max_new_tokens=0)
        row = Row(request, came_s, num_tokens)
        self._waiting.append(row)
        self.taken += 1
        return row

    def _leave(self, row: Row) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting is not row]
        self._running = [running for running in self._running if running is not row]

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self._produces, self._generates = produces, generates
        for row in [*self._waiting, *self._running]:
            if not (produces if row.produces else generates):
                row.outbox.put_nowait(_handed_over())

    def _check(self, *, takes: bool) -> None:
        if not takes:
            raise _handed_over()

    async def drain_publications(self) -> None:
        """It stores nothing."""

    def load(self) -> WorkerLoad:
        queued = sum(row.left for row in self._waiting)
        live_bytes = MEMORY_BYTES * len(self._running) // self._rows_max
        return WorkerLoad(
            queued_tokens=int(queued),
            queued_s=queued / self._rate,
            running_rows=len(self._running),
            waiting_rows=len(self._waiting),
            memory=MemoryUse(pages_live=live_bytes, free=MEMORY_BYTES - live_bytes),
            budget_bytes=MEMORY_BYTES,
            speed=Speed(step_s=1e-6, token_s=1 / self._rate),
            counters={"steps": float(self.steps), "taken": float(self.taken)},
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        return Announcement(full=full)

    def resize(self, budget_bytes: int) -> None:
        """It holds nothing."""


def _handed_over() -> HandedOver:
    return HandedOver("ordered to leave it to others")


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> FakeBuilt:
    """`step_tokens_max` is its prompt tokens in a second."""
    del progress, start_ranks
    facts = EngineInfo(
        fingerprint="paced",
        layout="none",
        page_bytes=1,
        max_model_len=4096,
        vocab_size=FIRST_TOKEN + NUM_TOKENS,
        eos_token_ids=(EOS,),
        device="cpu",
        memory_bytes=MEMORY_BYTES,
        memory_floor_bytes=MEMORY_BYTES,
        memory_max_bytes=MEMORY_BYTES,
    )
    tokens, rows = STEP
    engine = PacedEngine(settings.max_num_batched_tokens or tokens, settings.max_num_seqs or rows)
    return FakeBuilt(engine=engine, info=facts)


def serve(options: dict[str, Any]) -> None:
    """Serve until a signal arrives; the first line of the output is the URL."""
    os.environ.update(ray_environ(joins=False, token=secrets.token_hex(16)))
    from tidemill.cluster.edge.requests.context import Sources  # noqa: PLC0415 - Ray reads the environment when imported
    from tidemill.cluster.edge.requests.limits import EdgeLimits  # noqa: PLC0415 - the same
    from tidemill.cluster.processes.endpoint.endpoint import Endpoint  # noqa: PLC0415 - the same
    from tidemill.cluster.processes.server import serve  # noqa: PLC0415 - the same

    def workers(fleet: dict[str, Any]) -> tuple[WorkerSettings, ...]:
        engine = EngineSettings(
            model_folder=KEEPER,
            memory_bytes=MEMORY_BYTES,
            store_url="memory:",
            cache_folder=Path("none"),
            max_num_batched_tokens=fleet["tokens_per_s"],
            max_num_seqs=fleet["rows_max"],
        )
        return tuple(
            WorkerSettings(name=name, role=role, engine=engine, build="tests.support.e2e.paced:build")
            for name, role in fleet["workers"].items()
        )

    async def work(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    sources = Sources(
        clock_s=time.monotonic, unix_time_s=time.time, new_id=lambda: uuid.uuid4().hex, rng=Random(1)
    )
    endpoint = Endpoint(host="127.0.0.1", port=0, limits=EdgeLimits(send_s_max=options["send_s_max"]))
    bounds = {role: Bounds(least=1, most=most) for role, most in options.get("most", {}).items()}
    hysteresis = Hysteresis(**options.get("hysteresis", {}))
    paced = workers(options)
    fleets = [FleetSettings(workers=paced, names=("paced",), bounds=bounds, hysteresis=hysteresis)]
    fleets += [  # other models, which nothing scales but people
        FleetSettings(
            workers=workers({**options, **other}),
            names=(name,),
            router=RouterSettings(name=f"router-{name}"),
            hysteresis=hysteresis,
            label=name,
        )
        for name, other in options.get("others", {}).items()
    ]
    settings = ClusterSettings(fleets=tuple(fleets))
    serve(endpoint, settings, sources, Console(stderr=True), work)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
