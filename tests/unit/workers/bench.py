"""One engine around the fake model of the simulator, in virtual time, that must end with all memory back."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from tests.sim.fold import FoldRunner, expected, fold_layout
from tests.sim.loop import simulate
from tidemill.kvstore.arena import Arena
from tidemill.kvstore.backing import Fixed
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.ledger import Ledger
from tidemill.kvstore.memory_store import MemoryStore
from tidemill.kvstore.store import PageStore
from tidemill.workers.build import capacity_tokens
from tidemill.workers.engine import Engine, Limits
from tidemill.workers.messages import Delta, Provenance, Request, Sampling
from tidemill.workers.plan import Budget
from tidemill.workers.step import Runner, Step
from tidemill.workers.transfer import Transfer

VIRTUAL_S_MAX = 1000.0
STORE_BYTES = 1 << 20
HYBRID = fold_layout(4, hybrid=True)


@dataclass(frozen=True)
class Bench:
    """An engine whose step loop runs, and everything in it."""

    engine: Engine
    ledger: Ledger
    store: PageStore
    layout: Layout

    async def answer(self, request: Request) -> Provenance:
        """Generate to the end, check every token; says where the prompt came from."""
        got: list[int] = []
        deltas: list[Delta] = []
        async with aclosing(self.engine.generate(request)) as stream:
            async for delta in stream:
                got += delta.tokens
                deltas.append(delta)
        assert got == expected(request, hybrid=self.layout.hybrid)
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        provenance = deltas[0].provenance
        assert provenance is not None
        assert all(delta.provenance is None for delta in deltas[1:])
        return provenance

    async def settle(self) -> None:
        """Wait for the steps and publications of requests that have ended."""
        while self.ledger.num_leases:
            await self.engine.drain_publications()
            await asyncio.sleep(0.01)
        self.ledger.check()


@asynccontextmanager
async def bench(
    store: PageStore | None = None,
    *,
    layout: Layout = HYBRID,
    num_extents: int = 64,
    tokens_max: int = 0,
    runner: Runner | None = None,
) -> AsyncGenerator[Bench]:
    page_tokens = layout.page_tokens
    backing = Fixed(layout.extent_bytes * num_extents)
    memory = backing.memory.numpy().data
    ledger = Ledger(layout, Arena(layout, num_extents, backing))
    store = a_store() if store is None else store
    engine = Engine(
        ledger,
        Transfer(layout, memory, store),
        runner or FoldRunner(layout, memory, Random(0), step_s_max=0.02),
        Limits(
            budget=Budget(tokens_max=max(tokens_max, 8 + page_tokens), rows_max=8, page_tokens=page_tokens),
            capacity_tokens=capacity_tokens(layout, num_extents),
        ),
        root_of,
    )
    loop = asyncio.create_task(engine.run())
    made = Bench(engine, ledger, store, layout)
    try:
        async with asyncio.timeout(VIRTUAL_S_MAX):
            yield made
            await made.settle()
            assert engine.num_requests == 0
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError, Broken):
            await loop


class Broken(Exception):
    """What the runner of a test raises."""


class BrokenRunner:
    """Never finishes its step number `last`, but breaks."""

    def __init__(self, last: int) -> None:
        self._left = last

    async def run(self, step: Step) -> list[int | None]:
        await asyncio.sleep(1.0)
        self._left -= 1
        if not self._left:
            raise Broken
        return [None if row.sampling is None else 0 for row in step]


def a_store() -> MemoryStore:
    return MemoryStore(STORE_BYTES)


def root_of(salt: str) -> PageKey:
    return Namespace(model="fold", layout="", salt=salt).root()


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(251) for _ in range(num_tokens))


def a_request(tokens: tuple[int, ...], max_new_tokens: int = 6, **changes: str | int) -> Request:
    gap = changes.get("gap_tokens_max")
    return Request(
        request_id=str(changes.get("request_id", "r")),
        tokens=tokens,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(seed=1),
        salt=str(changes.get("salt", "")),
        gap_tokens_max=None if gap is None else int(gap),
    )


def run(main: Coroutine[None, None, None], seed: int = 0) -> None:
    simulate(seed, main)
