"""The file store beside plain files and a plain copy of the same bytes.

python -m benchmarks.store --folder /dev/shm --folder /var/tmp --batch 8
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import xxhash
from rich.console import Console
from rich.table import Table

from tidemill.kvstore.file_store import FileStore
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.store import Got, Put

SIZES = ("32KiB", "1.5MiB", "75MiB")
TOTAL_BYTES = 150 << 20
OBJECTS_MAX = 512
RATIOS = (("put", "write"), ("put", "memcpy"), ("get", "read"), ("get", "memcpy"))

Objects = Sequence[tuple[ObjectKey, memoryview]]


class Stopwatch:
    """Seconds by name, a list of rounds each."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start_s)


async def one_round(watch: Stopwatch, place: Path, objects: Objects, wanted: Objects, batch: int) -> None:
    """Copy, hash, write, read, put, get and look up the same bytes, in `place`, one after another."""
    with watch("memcpy"):
        for (_, body), (_, view) in zip(objects, wanted, strict=True):
            view[:] = body
    with watch("hash"):
        for _, body in objects:
            xxhash.xxh3_128_digest(body)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        paths = [Path(folder, str(index)) for index in range(len(objects))]
        with watch("write"):
            for path, (_, body) in zip(paths, objects, strict=True):
                with path.open("xb", buffering=0) as file:
                    assert file.write(body) == len(body)
        with watch("read"):
            for path, (_, view) in zip(paths, wanted, strict=True):
                with path.open("rb", buffering=0) as file:
                    assert file.readinto(view) == len(view)
    # the plain files are gone by now: their write-back would slow ours
    with tempfile.TemporaryDirectory(dir=place) as folder:
        store = FileStore(Path(folder), 8 * TOTAL_BYTES)
        batches = [slice(start, start + batch) for start in range(0, len(objects), batch)]
        with watch("put"):
            for part in batches:
                assert set(await store.put(objects[part])) == {Put.STORED}
        with watch("get"):
            for part in batches:
                assert set(await store.get(wanted[part])) == {Got.HIT}
        with watch("contains"):
            for part in batches:
                assert all(await store.contains([key for key, _ in objects[part]]))
        await store.close()


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; a ratio of throughputs above 1 says that the first one is faster."""

    place: str
    size: str
    batch: int
    gb_s: dict[str, float]
    ratios: dict[str, float]
    contains_us: float

    def row(self) -> dict[str, str]:
        numbers = {**self.gb_s, **self.ratios, "contains us": self.contains_us}
        texts = {name: f"{number:.2f}" for name, number in numbers.items()}
        return {"place": self.place, "size": self.size, "batch": str(self.batch), **texts}


def measure(place: Path, size: str, batch: int, rounds: int) -> Result:
    num_bytes, rng, watch = parse_bytes(size), Random(0), Stopwatch()
    count = min(OBJECTS_MAX, max(2, TOTAL_BYTES // num_bytes))
    memory = memoryview(bytearray(rng.randbytes(num_bytes) * count))
    into = memoryview(bytearray(memory))  # touched, so that no way pays for its page faults
    spans = [slice(index * num_bytes, (index + 1) * num_bytes) for index in range(count)]
    for _ in range(rounds):
        keys = [ObjectKey(Kind.PAGE, PageKey(rng.randbytes(16))) for _ in range(count)]
        objects = [(key, memory[span]) for key, span in zip(keys, spans, strict=True)]
        wanted = [(key, into[span]) for key, span in zip(keys, spans, strict=True)]
        asyncio.run(one_round(watch, place, objects, wanted, batch))
    seconds = {name: median(times) for name, times in watch.seconds.items()}
    contains_s = seconds.pop("contains")
    return Result(
        place=str(place),
        size=size,
        batch=min(batch, count),
        gb_s={name: len(memory) / one / 1e9 for name, one in seconds.items()},
        ratios={f"{ours}:{other}": seconds[other] / seconds[ours] for ours, other in RATIOS},
        contains_us=contains_s / count * 1e6,
    )


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title="file store, GB/s and ratios of throughput", box=None)
    rows = [result.row() for result in results]
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.values())
    return table


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store")
    parser.add_argument("--folder", type=Path, action="append", help="where the files are; may be repeated")
    parser.add_argument("--size", choices=SIZES, action="append", help="of an object; may be repeated")
    parser.add_argument("--batch", type=int, default=8, help="objects per call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = [
        measure(place, size, options.batch, options.rounds)
        for place in options.folder or [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - tmpfs is the point
        for size in options.size or SIZES
    ]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        Console(width=200).print(table_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
