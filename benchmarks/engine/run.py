"""One run of one engine over a load, or of transformers over the same."""

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
import transformers

from benchmarks.kernels import HYBRID_77M
from tidemill.cluster.bench.report import mean, percentile
from tidemill.workers.engine.build import BuiltEngine, build_engine
from tidemill.workers.engine.commit import StepCommitter
from tidemill.workers.engine.rank_processes import start_ranks
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.scheduling.scheduler import Scheduler
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    prompts: list[list[int]]
    new_tokens: int
    temperature: float = 0.0

    def requests(self) -> list[Request]:
        return [
            Request(
                request_id=str(number),
                tokens=tuple(prompt),
                max_new_tokens=self.new_tokens,
                sampling=Sampling(temperature=self.temperature, seed=number),
            )
            for number, prompt in enumerate(self.prompts)
        ]


@dataclass(slots=True, kw_only=True)
class Run:
    """The result of a run. Times are of the whole load, without loading the model. `parts_ms` are CPU
    milliseconds of a step by part."""

    tokens: list[list[int]]
    wall_s: float
    cpu_s: float
    gaps_s: list[float] = field(default_factory=list[float])
    parts_ms: dict[str, float] = field(default_factory=dict[str, float])
    accepted_length: float = 0.0  # tokens that a row with guesses brought
    flood_tokens_per_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_ms_per_token(self) -> float:
        return 1e3 * self.cpu_s / self.num_tokens

    @property
    def itl_ms_mean(self) -> float:
        return 1e3 * mean(self.gaps_s)

    @property
    def itl_ms_p99(self) -> float:
        return 1e3 * percentile(self.gaps_s, 99)


def measure(settings: EngineSettings, load: Load, *, watch: bool = False, flood_tokens: int = 0) -> Run:
    """Measure a new engine with an empty cache. `watch` measures the parts of a step separately;
    `flood_tokens` is the length of other prompts that keep arriving, each for one token."""
    return asyncio.run(_measure(settings, load, watch=watch, flood_tokens=flood_tokens))


async def _measure(settings: EngineSettings, load: Load, *, watch: bool, flood_tokens: int) -> Run:
    async with running(settings) as (built, processes):
        await _answer(built, Request(request_id="warm", tokens=(5, 6, 7), max_new_tokens=4))
        flood = asyncio.create_task(_flood(built, flood_tokens))
        parts = defaultdict[str, float](float)
        with _watched(parts) if watch else nullcontext():
            before = built.engine.load().counters
            cpu_s, loop_s, wall_s = spent(processes), time.thread_time(), time.perf_counter()
            answers = await asyncio.gather(*(_answer(built, request) for request in load.requests()))
            wall_s = time.perf_counter() - wall_s
            cpu_s, loop_s = spent(processes) - cpu_s, time.thread_time() - loop_s
        flood.cancel()
        after = built.engine.load().counters
        ran = {name: after[name] - before.get(name, 0) for name in after}
        parts["loop"] = loop_s
        own = sum(len(prompt) + load.new_tokens - 1 for prompt in load.prompts)
        return Run(
            tokens=[tokens for tokens, _ in answers],
            wall_s=wall_s,
            cpu_s=cpu_s,
            gaps_s=[gap for _, times_s in answers for gap in _gaps(times_s)],
            parts_ms={name: 1e3 * seconds / ran["steps"] for name, seconds in parts.items()},
            accepted_length=1 + ran["spec_accepted_tokens"] / ran["spec_trials"]
            if ran.get("spec_trials")
            else 0,
            flood_tokens_per_s=(ran["computed_tokens"] - own) / wall_s,
        )


def generate(model: Any, load: Load) -> Run:  # noqa: ANN401  transformers has no usable types
    """The same by `transformers`: one batch, greedy."""
    prompts = torch.tensor(load.prompts)
    gc.collect()
    with torch.inference_mode():
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=load.new_tokens,
            min_new_tokens=load.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    tokens = [[int(token) for token in row] for row in out[:, prompts.shape[1] :]]
    return Run(tokens=tokens, wall_s=wall_s, cpu_s=cpu_s)


def model_folder(name: str, scratch: Path) -> Path:
    """A bundled model, or random weights of a size that a step of it is mostly matrices."""
    if name in bundled():
        return bundled()[name]
    folder = scratch / name
    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.Qwen3NextConfig(**HYBRID_77M)
        transformers.Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder


def spent(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@asynccontextmanager
async def running(settings: EngineSettings) -> AsyncGenerator[tuple[BuiltEngine, list[psutil.Process]]]:
    """An engine whose loop runs, and its processes, ranks included."""
    me = psutil.Process()
    known = set(me.children(recursive=True))
    built = await asyncio.to_thread(build_engine, settings, lambda _done, _total: None, start_ranks)
    loop = asyncio.create_task(built.engine.run())
    try:
        yield built, [me, *(child for child in me.children(recursive=True) if child not in known)]
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        built.close()


async def _answer(built: BuiltEngine, request: Request) -> tuple[list[int], list[float]]:
    """Its tokens, and when each delta came with how many."""
    tokens: list[int] = []
    times_s: list[float] = []
    async with aclosing(built.engine.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
            times_s += [time.perf_counter()] * len(delta.tokens)
    return tokens, times_s


def _gaps(times_s: Sequence[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in pairwise(times_s))


async def _flood(built: BuiltEngine, num_tokens: int) -> None:
    """Keeps two long prompts waiting or running all the time."""
    rng = Random(1)

    async def one(number: int) -> None:
        tokens = tuple(rng.randrange(3, 800) for _ in range(num_tokens))
        await _answer(built, Request(request_id=f"flood-{number}", tokens=tokens, max_new_tokens=1))

    numbers = count()

    async def keep_coming() -> None:
        while num_tokens:
            await one(next(numbers))

    await asyncio.gather(keep_coming(), keep_coming())


@contextmanager
def _watched(parts: dict[str, float]) -> Iterator[None]:
    """CPU seconds of the calling thread inside of these methods."""
    methods: list[tuple[type, str, str]] = [
        (Scheduler, "next_step", "schedule"),
        (StepCommitter, "commit", "land"),
        (TorchRunner, "run_now", "model"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in methods]
    for (owner, name, original), (_, _, part) in zip(originals, methods, strict=True):
        setattr(owner, name, _timed(original, part, parts))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _timed(call: Callable[..., object], part: str, parts: dict[str, float]) -> Callable[..., object]:
    def timed(*args: object, **options: object) -> object:
        start_s = time.thread_time()
        try:
            return call(*args, **options)
        finally:
            parts[part] += time.thread_time() - start_s

    return timed
