"""The cost of caching for requests without hits: CPU time of the engine outside the model.

Long unique prompts of random tokens run through a real engine around `keeper`. Its cache is full,
so that each new page evicts one. The model runs on the same thread in the same run.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import ParamSpec, TypeVar

from benchmarks.memory.served_model import NoStore
from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.keys import Namespace, PageKey, page_keys
from tidemill.kvstore.layout import layout_of
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.engine.engine import Engine
from tidemill.workers.engine.memory_plan import capacity_tokens
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.step import Drawn, Step
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.registry import load
from tidemill.workers.models.inputs import caches_of
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.sources.names import bundled
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

P = ParamSpec("P")
R = TypeVar("R")

PAGE_TOKENS = 64
INDEX_PARTS = ("match",)
LEDGER_PARTS = ("attach", "reserve", "launch", "commit", "keep_state", "release")
"""The calls into the memory: `reserve` evicts, `commit` inserts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """CPU milliseconds per prompt once the cache is full. engine_ms is all time outside the model: the parts,
    and also planning and streams."""

    policy: Policy
    prompt_tokens: int
    prompts: int
    model_ms: float
    engine_ms: float
    keys_ms: float
    parts_ms: dict[str, float]
    evicted_pages: int

    @property
    def caching_ms(self) -> float:
        return self.keys_ms + sum(self.parts_ms.values())

    @property
    def caching_ratio(self) -> float:
        return self.caching_ms / self.model_ms

    @property
    def engine_ratio(self) -> float:
        return self.engine_ms / self.model_ms


class Watch:
    """Measures CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        start_s = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] += time.process_time() - start_s

    def timed(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self(name):
                return call(*args, **kwargs)

        return timed

    def attach_to(self, owner: object, names: Seq[str]) -> None:
        """Time these methods of `owner` from now on."""
        for name in names:
            setattr(owner, name, self.timed(name, getattr(owner, name)))


class TimedRunner:
    """Runs the model on the thread of the engine."""

    def __init__(self, runner: TorchRunner, watch: Watch) -> None:
        self._runner = runner
        self._watch = watch

    async def run(self, step: Step) -> list[Drawn]:
        with self._watch("model"):
            return self._runner.run_now(step)


def overhead(policy: Policy, ops: Operators, *, prompt_tokens: int, prompts: int) -> Overhead:
    return asyncio.run(_overhead(policy, ops, prompt_tokens, prompts))


@dataclass(frozen=True, slots=True)
class _Bench:
    engine: Engine
    ledger: Ledger
    root: PageKey
    vocab_size: int


def _bench(policy: Policy, ops: Operators, watch: Watch, prompt_tokens: int) -> _Bench:
    """Open an engine around keeper with memory for slightly more than two prompts."""
    loaded = load(bundled()["keeper"], ops, lambda _done, _total: None)
    layout = layout_of(loaded.layers, PAGE_TOKENS)
    num_extents = 2 + -(-2 * prompt_tokens // (layout.pages_per_extent * layout.page_tokens))
    backing = Fixed(num_extents * layout.extent_bytes)
    index = PrefixIndex(layout, policy, loaded.cost)
    ledger = Ledger(Cache(layout, Arena(layout, num_extents, backing), index))
    watch.attach_to(index, INDEX_PARTS)
    watch.attach_to(ledger, LEDGER_PARTS)
    root = Namespace(model=loaded.fingerprint, layout=layout.describe()).root()
    model = TorchRunner(loaded.model, caches_of(layout, backing.memory), PAGE_TOKENS, 1)
    engine = Engine(
        ledger,
        Transfer(layout, DirectIO(NoStore(), backing.memory.numpy().data)),
        TimedRunner(model, watch),
        EngineLimits(
            budget=Budget(tokens_max=512, rows_max=64, page_tokens=PAGE_TOKENS),
            capacity_tokens=capacity_tokens(layout, num_extents),
        ),
        lambda _salt: root,
    )
    return _Bench(engine, ledger, root, loaded.vocab_size)


async def _overhead(policy: Policy, ops: Operators, prompt_tokens: int, prompts: int) -> Overhead:
    watch, rng = Watch(), Random(0)
    bench = _bench(policy, ops, watch, prompt_tokens)
    texts = [tuple(rng.choices(range(16, bench.vocab_size), k=prompt_tokens)) for _ in range(2 + prompts)]
    steps = asyncio.create_task(bench.engine.run())
    await _run(bench.engine, texts[:2])  # the cache is full now
    watch.seconds.clear()
    evicted = bench.ledger.counters["evicted_pages_for_pages"]
    start_s = time.process_time()
    await _run(bench.engine, texts[2:])
    total_s = time.process_time() - start_s
    steps.cancel()
    with suppress(asyncio.CancelledError):
        await steps
    with watch("keys"):
        for tokens in texts[2:]:
            page_keys(bench.root, tokens, PAGE_TOKENS)
    ms = {name: 1000 * seconds / prompts for name, seconds in watch.seconds.items()}
    return Overhead(
        policy=policy,
        prompt_tokens=prompt_tokens,
        prompts=prompts,
        model_ms=ms["model"],
        engine_ms=1000 * total_s / prompts - ms["model"],
        keys_ms=ms["keys"],
        parts_ms={name: ms.get(name, 0.0) for name in (*INDEX_PARTS, *LEDGER_PARTS)},
        evicted_pages=bench.ledger.counters["evicted_pages_for_pages"] - evicted,
    )


async def _run(engine: Engine, texts: Seq[tuple[int, ...]]) -> None:
    """Prefill each text and sample one token."""
    for number, tokens in enumerate(texts):
        request = Request(
            request_id=str(number), tokens=tokens, max_new_tokens=1, sampling=Sampling(temperature=0)
        )
        async with aclosing(engine.generate(request)) as deltas:
            async for _ in deltas:
                pass
