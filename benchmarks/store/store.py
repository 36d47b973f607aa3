"""The page stores, compared with a plain copy and with Mooncake's own client in the same run.

python -m benchmarks.store.store --size 1.5MiB --batch 8 --batch 32
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from tests.support.mooncake import PlainClient, mooncake

from benchmarks.store.raw import (
    Call,
    MasterLoad,
    Memcpy,
    Memory,
    Plain,
    Sized,
    Stored,
    Way,
    cpu_s,
    master_load,
    touch_lent,
)
from tidemill.kvstore.keys import Kind
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.mooncake_store import open_mooncake
from tidemill.kvstore.stores.page_store import PageStore

SIZES = ("64KiB", "1.5MiB", "75MiB")
BATCHES = (1, 8, 32, 128)
ROUND_BYTES = 192 << 20
"""The most bytes in a store at a time, and so in one call."""
CALLS_MAX = 32
OBJECTS_MAX = 512  # ext4 is slow to create files just after thousands were deleted
LENT_BYTES = 512 << 20
FILE_BYTES = 2 << 30

MEMCPY, PLAIN, OURS = "memcpy", "plain client", "mooncake"


class Spent(NamedTuple):
    """The cost of one operation of a way in a round."""

    calls_s: list[float]
    cpu_s: float  # of this process, the owner and the master
    load: MasterLoad

    @property
    def all_s(self) -> float:
        return sum(self.calls_s)


SpentByOperation = dict[str, Spent]
"""The cost of one way in a round, by operation."""

Round = dict[tuple[str, str], SpentByOperation]
"""A round, by form of the objects and by way."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The ways to measure, and their memory and clocks."""

    ways: Mapping[str, Way]
    memory: Memory
    cpu_s: Callable[[], float]
    load: Callable[[], MasterLoad]

    async def rounds(self, forms: Mapping[str, Sequence[Sized]], count: int) -> list[Round]:
        """Run all ways with all forms, in another order each round. A first round is a warm-up that compares
        the bytes."""
        rng = Random(0)
        pairs = [(form, way) for form in forms for way in self.ways]
        found: list[Round] = []
        for index in range(count + 1):
            times: Round = {}
            for form, way in rng.sample(pairs, len(pairs)):
                calls = self.memory.calls(forms[form], rng)
                if index == 0:
                    self.memory.target.fill(0)
                times[form, way] = await self._run_way(self.ways[way], calls)
                if index == 0:
                    assert self.memory.arrived(calls)
            found.append({pair: times[pair] for pair in pairs})
        return found[1:]

    async def _run_way(self, way: Way, calls: Sequence[Call]) -> SpentByOperation:
        spent: SpentByOperation = {}
        for name, operation in (("put", way.put), ("get", way.get), ("contains", way.contains)):
            load, cpu_s = self.load(), self.cpu_s()
            calls_s: list[float] = []
            for call in calls:
                start_s = time.perf_counter()
                await operation(call)
                calls_s.append(time.perf_counter() - start_s)
            spent[name] = Spent(calls_s, self.cpu_s() - cpu_s, self.load().since(load))
        for call in calls:
            await way.remove(call)
        return spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The medians of one operation of one way. Ratios are of throughputs within a round: above 1 this way is
    faster."""

    gb_s: float
    of_plain: float
    of_memcpy: float
    cpu_ms_per_gb: float
    call_ms: float
    master_requests: float  # of a call
    master_objects: float  # of a call


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    form: str
    batch: int  # objects in a call
    way: str
    put: Moved
    get: Moved
    contains_ms: float  # of a call

    def row(self) -> list[str]:
        moved = [
            text
            for moved in (self.put, self.get)
            for text in (
                f"{moved.gb_s:.2f}",
                f"{moved.of_plain:.2f}",
                f"{moved.of_memcpy:.3f}",
                f"{moved.cpu_ms_per_gb:,.0f}",
                f"{moved.call_ms:.2f}",
                f"{moved.master_requests:.0f} / {moved.master_objects:.0f}",
            )
        ]
        return [self.form, str(self.batch), self.way, *moved, f"{self.contains_ms:.2f}"]


def summarize(rounds: Sequence[Round], forms: Mapping[str, Sequence[Sized]]) -> list[Result]:
    return [
        Result(
            form=form,
            batch=len(forms[form][0]),
            way=way,
            put=_moved(rounds, "put", form, way, forms[form]),
            get=_moved(rounds, "get", form, way, forms[form]),
            contains_ms=_call_ms(times[form, way]["contains"] for times in rounds),
        )
        for form in forms
        for way in dict.fromkeys(way for _, way in rounds[0])
    ]


def _moved(rounds: Sequence[Round], operation: str, form: str, way: str, calls: Sequence[Sized]) -> Moved:
    spent = [times[form, way][operation] for times in rounds]
    gigabytes = sum(num_bytes for call in calls for _, num_bytes in call) / 1e9

    def faster_than(other: str) -> float:
        return median(
            times[form, other][operation].all_s / times[form, way][operation].all_s for times in rounds
        )

    return Moved(
        gb_s=median(gigabytes / sample.all_s for sample in spent),
        of_plain=faster_than(PLAIN),
        of_memcpy=faster_than(MEMCPY),
        cpu_ms_per_gb=median(1e3 * sample.cpu_s / gigabytes for sample in spent),
        call_ms=_call_ms(spent),
        master_requests=median(sample.load.requests / len(calls) for sample in spent),
        master_objects=median(sample.load.objects / len(calls) for sample in spent),
    )


def _call_ms(spent: Iterable[Spent]) -> float:
    return 1e3 * median(call_s for sample in spent for call_s in sample.calls_s)


async def throughput(bench: Bench, sizes: Sequence[str], batches: Sequence[int], count: int) -> list[Result]:
    found: list[Result] = []
    for size in sizes:
        num_bytes = parse_bytes(size)
        for batch in sorted({min(batch, ROUND_BYTES // num_bytes) for batch in batches}):
            calls = max(1, min(CALLS_MAX, OBJECTS_MAX // batch, ROUND_BYTES // (batch * num_bytes)))
            forms = {size: [[(Kind.PAGE, num_bytes)] * batch] * calls}
            found += summarize(await bench.rounds(forms, count), forms)
    return found


def table_of(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    moved = ("GB/s", ":plain", ":memcpy", "CPU ms/GB", "ms", "asked")
    for name in ("objects", "batch", "way", "put GB/s", *moved[1:], "get GB/s", *moved[1:], "contains ms"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for above, result in zip([None, *results], results, strict=False):
        if above and (above.form, above.batch) != (result.form, result.batch):
            table.add_row()
        table.add_row(*result.row())
    return table


@asynccontextmanager
async def open_bench(folders: Sequence[Path]) -> AsyncGenerator[Bench]:
    """Open all ways: a Mooncake on this host, and file stores in new folders within `folders`."""
    memory = Memory.of(ROUND_BYTES)
    async with AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")
        service = stack.enter_context(mooncake(log, LENT_BYTES))
        client = PlainClient(service)
        stack.callback(client.close)
        touch_lent(service, client, memory)
        stores: dict[str, PageStore] = {OURS: open_mooncake(service.address, admin=service.admin)}
        for folder in folders:
            path = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            stores[f"file {folder}"] = FileStore(Path(path), FILE_BYTES)
        for store in stores.values():
            stack.push_async_callback(store.close)
            for buffer in (memory.source, memory.target):
                store.register(buffer.data)
        ways: dict[str, Way] = {MEMCPY: Memcpy(), PLAIN: Plain(client, memory)}
        ways |= {name: Stored(store) for name, store in stores.items()}
        pids = (service.owners[0].pid, service.master.pid)
        yield Bench(
            ways,
            memory,
            lambda: time.process_time() + sum(cpu_s(pid) for pid in pids),
            lambda: master_load(service),
        )


async def measure(options: argparse.Namespace) -> list[Result]:
    folders = options.folder or [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - tmpfs is the point
    async with open_bench(folders) as bench:
        return await throughput(bench, options.size or SIZES, options.batch or BATCHES, options.rounds)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store.store")
    parser.add_argument("--folder", type=Path, action="append", help="of a file store; may be repeated")
    parser.add_argument("--size", choices=SIZES, action="append", help="of an object; may be repeated")
    parser.add_argument("--batch", type=int, action="append", help="objects per call; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = asyncio.run(measure(options))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        Console(width=160).print(table_of("page stores", results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
