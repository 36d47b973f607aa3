"""The share of its time that a device waits for the host, on a machine without a device.

    python -m benchmarks.engine.idle [--rows 128 1] [--turns 5] [--steps 200] [--profile]

The device is a clock. A step that is launched occupies it for a given time, after the steps before it, and
who waits for a step sleeps until then. Engine, scheduler, ledger, commit and the host part of the runner are
the real ones. As many readers as rows take the tokens in the same interpreter, and their frames are encoded.
A turn's share is the time between steps over all time; the figure is that of the best turn. The CPU time of a
step, of all threads, depends less on what else the machine does.
"""

import argparse
import asyncio
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tidemill.cluster.rpc.codec import StreamItem, encode_worker_frame
from tidemill.cluster.worker.worker_process import SWITCH_S, favour_steps
from tidemill.kernels.dispatch import operators
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Attention, Linear, layout_of
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.engine.engine import Engine
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.overlapped_runner import OverlappedRunner
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.inputs import Caches, Inputs, Kept
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

LAYOUT = layout_of(
    (
        Linear(key_heads=1, value_heads=1, key_dim=2, value_dim=2, conv_width=2),
        Attention(kv_heads=1, head_dim=2),
    ),
    64,
    extent_bytes_min=1 << 16,
    granule_bytes=1,
)
PROMPT_TOKENS = 4096
STEP_S = {1: 3e-3, 128: 6e-3}
WARM_STEPS = 50
VOCABULARY = 8
PAGES_MAX = 128
MODES = ("in turn", "overlapped")


@dataclass
class Clock:
    """A device: `launch` returns when the step will end."""

    step_s: float
    free_at_s: float = 0.0
    idle_s: float = 0.0
    began_s: float = 0.0
    steps: int = 0
    cpu_began_s: float = 0.0
    cpu_ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list[float])

    def launch(self, *, decodes: bool) -> float:
        now_s = time.perf_counter()
        gap_s = max(0.0, now_s - self.free_at_s)
        self.free_at_s = max(now_s, self.free_at_s) + self.step_s * decodes
        if not decodes:
            self.steps = 0
            return self.free_at_s
        self.steps += 1
        if self.steps == WARM_STEPS:
            self.began_s, self.cpu_began_s = self.free_at_s, time.process_time()
            self.gaps_s.clear()
        elif self.steps > WARM_STEPS:
            self.gaps_s.append(gap_s)
            self.cpu_ended_s = time.process_time()
        return self.free_at_s

    @property
    def idle_share(self) -> float:
        return sum(self.gaps_s) / (self.free_at_s - self.began_s)

    @property
    def cpu_step_s(self) -> float:
        """Return the CPU time of one step, of all threads."""
        return (self.cpu_ended_s - self.cpu_began_s) / len(self.gaps_s)


def sleep_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class Clocked:
    """A model whose forward pass takes the time of a step. With `waits` its logits are those of a step that
    has ended."""

    def __init__(self, clock: Clock, *, waits: bool) -> None:
        self.ops = operators("cpu", Path(tempfile.gettempdir()) / "tidemill-kernels")
        self._clock = clock
        self._waits = waits

    def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:  # noqa: ARG002  of a model
        rows, tokens = len(inputs.lens_B), len(inputs.tokens_T)
        self._clock.launch(decodes=tokens == rows)
        return torch.zeros(tokens if kept is None else len(kept.tokens_K), VOCABULARY)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        if self._waits:
            sleep_until(self._clock.free_at_s)
        return hidden_NH


class ClockStream:
    """Launches steps on the clock."""

    device = torch.device("cpu")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def launch(self, work: Callable[[], None]) -> "ClockEvent":
        work()
        return ClockEvent(self._clock.free_at_s)


@dataclass(frozen=True)
class ClockEvent:
    end_s: float

    def synchronize(self) -> None:
        sleep_until(self.end_s)


def runner_of(clock: Clock, rows: int, *, overlapped: bool) -> TorchRunner:
    model, caches = Clocked(clock, waits=not overlapped), Caches((), (), ())
    if not overlapped:
        return TorchRunner(model, caches, LAYOUT.page_tokens, threads=1)
    tables = PageTables(rows, PAGES_MAX, windows=False)
    return OverlappedRunner(model, caches, LAYOUT.page_tokens, 1, ClockStream(clock), None, tables)  # pyrefly: ignore[bad-argument-type]


def root_of(salt: str) -> PageKey:
    return Namespace(model="clock", layout="", salt=salt).root()


async def turn(rows: int, steps: int, profile: cProfile.Profile | None, *, overlapped: bool) -> Clock:
    """Decode `rows` streams after prompts of PROMPT_TOKENS, for `steps` steps."""
    clock = Clock(STEP_S[rows])
    runner = runner_of(clock, rows, overlapped=overlapped)
    new_tokens = WARM_STEPS + steps
    page_extents = (
        rows * (-(-(PROMPT_TOKENS + new_tokens) // LAYOUT.page_tokens) + 2) // LAYOUT.pages_per_extent
    )
    extents = page_extents + 20 * rows // LAYOUT.states_per_extent + 8
    backing = Fixed(LAYOUT.extent_bytes * extents)
    arena = Arena(LAYOUT, extents, backing, extents)
    ledger = Ledger(Cache(LAYOUT, arena, PrefixIndex(LAYOUT, "value")))
    engine = Engine(
        ledger,
        Transfer(LAYOUT, DirectIO(MemoryStore(0), backing.memory.numpy().data)),
        runner,
        EngineLimits(
            budget=Budget(tokens_max=1 << 16, rows_max=256, page_tokens=LAYOUT.page_tokens),
            capacity_tokens=1 << 16,
            itl_target_s=0.0,
        ),
        root_of,
    )
    outbox: list[StreamItem] = []
    filled = asyncio.Event()

    async def read(number: int) -> None:
        request = Request(
            request_id=str(number),
            tokens=tuple((number * PROMPT_TOKENS + at) % 997 for at in range(PROMPT_TOKENS)),
            max_new_tokens=new_tokens,
            sampling=Sampling(temperature=0.0),
        )
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                outbox.append(StreamItem(number, delta))
                filled.set()

    async def send() -> None:
        while True:
            await filled.wait()
            filled.clear()
            encode_worker_frame(outbox)
            outbox.clear()

    background = [asyncio.create_task(engine.run()), asyncio.create_task(send())]
    if profile is not None:
        profile.enable()
    await asyncio.gather(*map(read, range(rows)))
    if profile is not None:
        profile.disable()
    for task in background:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    runner.close()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", choices=list(STEP_S), default=[128, 1])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--switch-interval", type=float, default=SWITCH_S, help="seconds; Python's is 0.005")
    parser.add_argument("--profile", action="store_true", help="of the event loop's thread")
    args = parser.parse_args()
    torch.set_num_threads(1)
    favour_steps()
    sys.setswitchinterval(args.switch_interval)
    for rows in args.rows:
        clocks: dict[str, list[Clock]] = {}
        for _ in range(args.turns):
            for name in args.modes:
                gc.collect()
                profile = cProfile.Profile(time.thread_time) if args.profile else None
                clock = asyncio.run(turn(rows, args.steps, profile, overlapped=name == "overlapped"))
                clocks.setdefault(name, []).append(clock)
                if profile is not None:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        for name, found in clocks.items():
            shares = " ".join(f"{share:.1%}" for share in sorted(clock.idle_share for clock in found))
            cpu_ms = 1e3 * min(clock.cpu_step_s for clock in found)
            print(f"{rows} rows, {name}: {shares}; {cpu_ms:.2f} ms of CPU time a step")


if __name__ == "__main__":
    main()
