"""The share of the transfer from prefill to decode that overlaps with computing the prompt.

python -m benchmarks.store.overlap

Two engines on one real Mooncake. `behind` computes the prompt in one step and moves it afterwards;
`overlapped` computes it in chunks and publishes each one, and the decode engine fetches them
meanwhile. The wait of a request is from the end of the last prefill step to its first step on the
decode engine. The hidden share of the transfer is `1 - overlapped / behind`.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table
from tests.support.mooncake import Mooncake, PlainClient, mooncake
from torch import Tensor

from benchmarks.memory.served_model import ATTENTION, ATTENTION_LAYERS, qwen_layout
from tidemill.kernels.dispatch import operators
from tidemill.kvstore.keys import Namespace
from tidemill.kvstore.layout import Layout, layout_of
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.stores.open_store import open_store
from tidemill.workers.engine.engine import Engine
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.step import Drawn, Runner, Step
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.registry import describe, load
from tidemill.workers.models.inputs import caches_of
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.sources.names import bundled
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

CHUNK_TOKENS = 512
LENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt length and a device. `tokens_per_s` is the speed of an idle device. 0 is the real keeper,
    whose steps use the cores of the transfer."""

    name: str
    layout: Layout
    prompt_tokens: int
    tokens_per_s: int


def cases() -> list[Case]:
    keeper = layout_of(describe(bundled()["keeper"])[0], 64)
    qwen, pages = qwen_layout(64), layout_of([ATTENTION] * ATTENTION_LAYERS, 64, kv_dtype="bfloat16")
    return [
        Case("keeper, computed", keeper, 1536, 0),
        Case("keeper's sizes", keeper, 1536, 20_000),
        *(Case("1.5 MiB pages alone", pages, 4096, speed) for speed in (4_000, 10_000, 20_000)),
        *(Case("and states of 75 MiB", qwen, 4096, speed) for speed in (4_000, 10_000, 20_000)),
    ]


class IdleDevice:
    """A runner that waits for the time of a step without using a core."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._free_s = 0.0

    async def run(self, step: Step) -> list[Drawn]:
        loop = asyncio.get_running_loop()
        num_tokens = sum(len(row.tokens) for row in step)
        self._free_s = max(self._free_s, loop.time()) + num_tokens / self._tokens_per_s
        await asyncio.sleep(self._free_s - loop.time())
        return [Drawn() if row.sampling_state is None else Drawn((7,)) for row in step]


class TimedRunner:
    """Records the start and end of each step of a runner."""

    def __init__(self, runner: Runner) -> None:
        self.first_began_s: float | None = None
        self.last_ended_s = 0.0
        self._runner = runner

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        if self.first_began_s is None:
            self.first_began_s = asyncio.get_running_loop().time()
        return asyncio.ensure_future(self._run(step))

    async def _run(self, step: Step) -> list[Drawn]:
        drawn = await self._runner.run(step)
        self.last_ended_s = asyncio.get_running_loop().time()
        return drawn


@asynccontextmanager
async def open_engine(case: Case, url: str, step_tokens: int) -> AsyncGenerator[tuple[Engine, TimedRunner]]:
    """Open the engine of a worker without its process; a step computes at most `step_tokens`."""
    layout = case.layout
    num_extents = 8 + 2 * (case.prompt_tokens // layout.page_tokens) // layout.pages_per_extent
    backing = Fixed(num_extents * layout.extent_bytes)
    backing.memory.zero_()  # page faults before the measurement
    arena_io = DirectIO(open_store(url), backing.memory.numpy().data)
    runner = TimedRunner(
        IdleDevice(case.tokens_per_s) if case.tokens_per_s else keeper_runner(layout, backing.memory)
    )
    engine = Engine(
        Ledger(Cache(layout, Arena(layout, num_extents, backing), PrefixIndex(layout))),
        Transfer(layout, arena_io),
        runner,
        EngineLimits(
            budget=Budget(tokens_max=step_tokens, rows_max=4, page_tokens=layout.page_tokens),
            capacity_tokens=2 * case.prompt_tokens,
        ),
        lambda salt: Namespace(model="overlap", layout=layout.describe(), salt=salt).root(),
    )
    steps = asyncio.create_task(engine.run())
    try:
        yield engine, runner
    finally:
        await engine.drain_publications()
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await steps
        await arena_io.store.close()


def keeper_runner(layout: Layout, memory: Tensor) -> TorchRunner:
    ops = operators("cpu", Path(tempfile.gettempdir()) / "tidemill-kernels")
    loaded = load(bundled()["keeper"], ops, lambda _done, _total: None)
    return TorchRunner(loaded.model, caches_of(layout, memory), layout.page_tokens, threads=1)


async def wait_s(case: Case, url: str, request: Request, *, overlapped: bool) -> float:
    """Return the time from the end of prefill to the first step of decode."""
    step_tokens = CHUNK_TOKENS if overlapped else 2 * case.prompt_tokens
    async with (
        open_engine(case, url, step_tokens) as (prefill, computed),
        open_engine(case, url, CHUNK_TOKENS) as (decode, decoded),
    ):
        prefetch = asyncio.create_task(decode.prefetch(request)) if overlapped else None
        produced = await prefill.produce(request)
        assert produced.depth == case.prompt_tokens, "the store lacks pages"
        if prefetch is not None:
            prefetch.cancel()
            await asyncio.wait([prefetch])
        async with aclosing(decode.generate(request)) as deltas:
            provenance = (await anext(deltas)).provenance
        assert provenance is not None
        assert provenance.fetched_tokens == case.prompt_tokens, provenance
        assert decoded.first_began_s is not None
        return decoded.first_began_s - computed.last_ended_s


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the rounds, in milliseconds, and of the hidden share."""

    case: Case
    behind_ms: float
    overlapped_ms: float
    hidden: float


def measure(case: Case, service: Mooncake, rounds: int) -> Result:
    url = f"mooncake://{service.address}?timeout=5s"
    rng = Random(repr(case))
    plain = PlainClient(service)
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair: list[float] = []
        for overlapped in (False, True):
            tokens = tuple(rng.randrange(5, 890) for _ in range(case.prompt_tokens + 1))
            request = Request(
                request_id=str(rng.random()),
                tokens=tokens,
                max_new_tokens=1,
                sampling=Sampling(temperature=0),
            )
            pair.append(asyncio.run(wait_s(case, url, request, overlapped=overlapped)))
            plain.clear()
        found.append((pair[0], pair[1]))
    plain.close()
    return Result(
        case,
        behind_ms=1e3 * median(behind for behind, _ in found),
        overlapped_ms=1e3 * median(overlapped for _, overlapped in found),
        hidden=median(1 - overlapped / behind for behind, overlapped in found),
    )


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title="transfer behind prefill compute, medians", box=None)
    for name in ("pages and states", "prompt", "device tokens/s", "behind ms", "overlapped ms", "hidden"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.case.name,
            str(result.case.prompt_tokens),
            str(result.case.tokens_per_s or "this CPU"),
            f"{result.behind_ms:.0f}",
            f"{result.overlapped_ms:.0f}",
            f"{result.hidden:.0%}",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store.overlap")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, mooncake(Path(folder, "log"), LENT_BYTES) as service:
        results = [measure(case, service, options.rounds) for case in cases()]
    Console(width=140).print(table_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
