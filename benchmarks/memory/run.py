"""Runs a workload in virtual time through a real scheduler, admission, ledger and index."""

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass

from benchmarks.memory.figures import Outcome, Sample
from benchmarks.memory.schemes import Scheme, SchemeArena, SchemeCache
from benchmarks.memory.served_model import COST, Device, ModelRunner, NoBytes, NoStore, qwen_layout
from tidemill.cluster.bench.workloads import Item, Workload
from tidemill.cluster.simulate.clock import run_virtual
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout, StateDtype
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.engine.engine import Engine
from tidemill.workers.engine.load_report import memory_use
from tidemill.workers.engine.memory_plan import capacity_tokens
from tidemill.workers.execution.step import Step
from tidemill.workers.messages import Provenance, Request, Sampling
from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.scheduling.sequence import Sequence
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of one run.

    scheme          the division of the memory; None: the elastic arena
    num_extents     the memory, in extents of a layout without a class of checkpoints
    clients         the clients, which send one request at a time each, in the order of the workload
    """

    num_extents: int
    scheme: Scheme | None = None
    policy: Policy = "value"
    strategy: CheckpointStrategy = "lazy"
    clients: int = 1024
    rows_max: int = 256
    tokens_max: int = 4096
    page_tokens: int = PAGE_TOKENS
    checkpoint_dtype: StateDtype | None = None

    @property
    def extents(self) -> int:
        """The extents of its layout."""
        num_bytes = self.num_extents * qwen_layout(self.page_tokens).extent_bytes
        return num_bytes // self.layout.extent_bytes

    @property
    def layout(self) -> Layout:
        return qwen_layout(self.page_tokens, self.checkpoint_dtype)

    @property
    def name(self) -> str:
        return "elastic" if self.scheme is None else self.scheme.name


class WatchedEngine(Engine):
    """Counts preemptions; `preemptions_max` is the most of one request."""

    preemptions_max = 0

    @property
    def num_running(self) -> int:
        return len(self._sequences.running)

    def _preempt(self, sequence: Sequence, error: Exception | None = None) -> None:
        super()._preempt(sequence, error)
        self.preemptions_max = max(self.preemptions_max, sequence.restore.preemptions)


def serve(workload: Workload, setup: Setup) -> Outcome:
    """Serve a workload, and assert that all memory is freed at the end."""
    return run_virtual(_serve(workload, setup))


def cache_of(setup: Setup) -> Cache:
    layout = setup.layout
    index = PrefixIndex(layout, setup.policy, COST)
    if setup.scheme is None:
        return Cache(layout, Arena(layout, setup.extents, NoBytes()), index)
    return SchemeCache(layout, SchemeArena(layout, setup.num_extents, setup.scheme), index)


async def _serve(workload: Workload, setup: Setup) -> Outcome:
    ledger = Ledger(cache_of(setup))
    layout = ledger.layout
    loop = asyncio.get_running_loop()
    samples: list[Sample] = []

    def observe(_: Step) -> None:
        samples.append(Sample(loop.time(), engine.num_running, ledger.num_slots, memory_use(ledger)))

    engine = WatchedEngine(
        ledger,
        Transfer(layout, DirectIO(NoStore(), memoryview(b""))),
        ModelRunner(layout, Device(), observe),
        EngineLimits(
            budget=Budget(
                tokens_max=setup.tokens_max, rows_max=setup.rows_max, page_tokens=layout.page_tokens
            ),
            capacity_tokens=capacity_tokens(layout, setup.extents),
            checkpoint_strategy=setup.strategy,
        ),
        _root_of,
    )
    steps = asyncio.create_task(engine.run())
    found = await _ask_all(engine, workload.items, setup.clients)
    makespan_s = loop.time()
    while ledger.num_leases:
        await engine.drain_publications()
        await asyncio.sleep(0.01)
    ledger.check()
    steps.cancel()
    with suppress(asyncio.CancelledError):
        await steps
    return Outcome(
        makespan_s=makespan_s,
        output_tokens=sum(item.max_tokens for item in workload.items),
        prompts=[len(item.tokens) for item in workload.items],
        reused=[provenance.reused_tokens for provenance in found],
        counters=dict(ledger.counters),
        preemptions_max=engine.preemptions_max,
        samples=samples,
    )


async def _ask_all(engine: Engine, items: tuple[Item, ...], clients: int) -> list[Provenance]:
    """Serve all requests; return the provenance of each prompt at its first admission."""
    done = [asyncio.Event() for _ in items]
    found = [Provenance()] * len(items)
    queue = iter(enumerate(items))

    async def client() -> None:
        for number, item in queue:
            if item.after is not None:
                await done[item.after].wait()
            request = Request(
                request_id=str(number),
                tokens=item.tokens,
                max_new_tokens=item.max_tokens,
                sampling=Sampling(seed=item.group),
            )
            async with aclosing(engine.generate(request)) as deltas:
                async for delta in deltas:
                    found[number] = delta.provenance or found[number]
            done[number].set()

    await asyncio.gather(*[client() for _ in range(clients)])
    return found


def _root_of(salt: str) -> PageKey:
    return Namespace(model="benchmark", layout="", salt=salt).root()
