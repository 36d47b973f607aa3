"""An engine without a model, for tests of the processes around it: counts up from the prompt's last token."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.cluster.messages import TokenSink
from tidemill.cluster.settings import WorkerSettings
from tidemill.cluster.worker.worker_process import RunningEngine
from tidemill.kvstore.errors import StoreError
from tidemill.workers.messages import (
    Announcement,
    Delta,
    EngineInfo,
    HandedOver,
    Produced,
    Provenance,
    Request,
    Role,
    WorkerLoad,
)
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.settings import EngineSettings

BREAK_TOKEN = 666
"""A prompt that ends with it breaks the step loop."""

STEP_S = 0.01
REFUSED_STORE = "file:///refused"


def worker(name: str, role: Role, store_url: str = "memory:") -> WorkerSettings:
    engine = EngineSettings(
        model_folder=Path("none"), memory_bytes=0, store_url=store_url, cache_folder=Path("none")
    )
    return WorkerSettings(name=name, role=role, engine=engine, build="tests.support.e2e.fake_engine:build")


class FakeEngine:
    def __init__(self) -> None:
        self.steps = 0
        self._running = 0
        self._stepped = asyncio.Condition()
        self._broken = False
        self._produces = self._generates = True

    @property
    def progress(self) -> int:
        return self.steps

    async def run(self) -> None:
        while not self._broken:
            await asyncio.sleep(STEP_S)
            self.steps += 1
            async with self._stepped:
                self._stepped.notify_all()
        raise RuntimeError("the step loop met its breaking point")

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        del notify
        self._check(takes=self._produces)
        depth = len(request.tokens) - 1
        return Produced(depth=depth, provenance=Provenance(computed_tokens=depth))

    def release(self, tenant: str, name: str) -> None:
        del tenant, name

    async def prefetch(self, request: Request) -> Produced:
        depth = len(request.tokens) - 1
        return Produced(depth=depth, provenance=Provenance(fetched_tokens=depth))

    async def generate(
        self, request: Request, notify: Notify | None = None, sink: TokenSink | None = None
    ) -> AsyncGenerator[Delta]:
        del notify, sink
        self._check(takes=self._generates)
        last = request.tokens[-1]
        self._broken |= last == BREAK_TOKEN
        self._running += 1
        try:
            for i in range(request.max_new_tokens):
                async with self._stepped:
                    await self._stepped.wait()
                self._check(takes=self._generates)
                yield Delta(
                    tokens=(last + i + 1,),
                    finish="length" if i + 1 == request.max_new_tokens else None,
                    provenance=Provenance(computed_tokens=len(request.tokens)) if i == 0 else None,
                )
        finally:
            self._running -= 1

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self._produces, self._generates = produces, generates

    async def drain_publications(self) -> None:
        """It stores nothing."""

    def _check(self, *, takes: bool) -> None:
        if not takes:
            raise HandedOver("ordered to leave it to others")

    def load(self) -> WorkerLoad:
        return WorkerLoad(running_rows=self._running, counters={"steps": float(self.steps)})

    def take_announcement(self, *, full: bool) -> Announcement:
        return Announcement(added=(b"12345678",) if full else (), full=full)

    def resize(self, budget_bytes: int) -> None:
        raise AssertionError(f"it has no memory, and was assigned {budget_bytes} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBuilt:
    engine: RunningEngine
    info: EngineInfo
    group: None = None


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> FakeBuilt:
    del start_ranks
    progress(1, 2)
    if settings.store_url == REFUSED_STORE:
        raise StoreError("the store at /refused cannot be written: give it another --store")
    progress(2, 2)
    facts = EngineInfo(
        fingerprint="fake",
        layout="none",
        max_model_len=2048,
        vocab_size=1000,
        eos_token_ids=(0,),
        device="cpu",
    )
    return FakeBuilt(engine=FakeEngine(), info=facts)
