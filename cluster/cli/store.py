"""`tidemill store`: list, read, remove and measure objects of a page store."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.cluster.cli.status import human_bytes, table
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.circuit_breaker import ABSENT
from tidemill.kvstore.stores.open_store import find_kind, is_shared, open_store
from tidemill.kvstore.stores.page_store import Got, PageStore, Put, StoredObject
from tidemill.kvstore.stores.seal import SEAL_BYTES, Sealing

_Result = TypeVar("_Result")

TIMEOUT = "timeout=60s"
"""The timeout for an operator who waits; a worker's is shorter, because it can compute instead."""

NAMES = {Kind.PAGE: "page", Kind.WINDOW: "window page", Kind.CHECKPOINT: "checkpoint"}


def with_store(url: str, sealing: Sealing, work: Callable[[PageStore], Awaitable[_Result]]) -> _Result:
    """Open the store, run `work` on it and close it. Raises StoreError."""
    if not is_shared(url):
        raise StoreError("store memory: is inside another process: give the URL of a file or mooncake store")

    async def run() -> _Result:
        store = open_store(_with_timeouts(url), sealing)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _with_timeouts(url: str) -> str:
    """Add `TIMEOUT` to each tier that takes a timeout and has none."""

    def with_timeout(tier: str) -> str:
        kind = find_kind(tier)
        if "timeout=" in tier or (kind is not None and kind.timeout_s is None):
            return tier
        return f"{tier}{'&' if '?' in tier else '?'}{TIMEOUT}"

    return ",".join(map(with_timeout, url.split(",")))


async def list_objects(store: PageStore) -> list[StoredObject]:
    """Return all objects of the store, the most recently used first."""
    return sorted(await store.list_objects(), key=lambda entry: (entry.used_s or 0.0, str(entry.key)))


def objects_json(objects: Sequence[StoredObject]) -> list[dict[str, Any]]:
    return [
        {
            "key": str(entry.key),
            "kind": NAMES[entry.key.kind],
            "shard": entry.key.shard,
            "bytes": entry.bytes,
            "used_s": entry.used_s,
        }
        for entry in objects
    ]


def objects_table(objects: Sequence[StoredObject]) -> Table:
    rows = table(("key", "kind", "shard", "size", "unused"), num_left=2)
    rows.columns[0].overflow = "fold"  # so that keys can be copied
    for entry in objects:
        used = "" if entry.used_s is None else human_time(entry.used_s)
        rows.add_row(
            str(entry.key), NAMES[entry.key.kind], str(entry.key.shard), human_bytes(entry.bytes), used
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A summary of a store. `bytes` and the counts are 0 when the store cannot list its objects."""

    is_reachable: bool
    answer_s: float  # latency of a get of an absent object
    pages: int
    checkpoints: int
    bytes: int
    capacity_bytes: int
    oldest_s: float | None  # time since the use of the least recently used object
    problem: str = ""


async def read_state(store: PageStore, clock: Callable[[], float]) -> State:
    started = clock()
    [got] = await store.get([(ABSENT, memoryview(bytearray(1)))])
    answer_s = clock() - started
    held: list[StoredObject] = []
    problem = ""
    try:
        held = await store.list_objects()
    except StoreError as error:
        problem = str(error)
    stats = store.stats()
    kinds = Counter(entry.key.kind for entry in held)
    ages = [entry.used_s for entry in held if entry.used_s is not None]
    return State(
        is_reachable=not stats.is_down and got is not Got.UNREACHABLE,
        answer_s=answer_s,
        pages=kinds[Kind.PAGE],
        checkpoints=kinds[Kind.CHECKPOINT],
        bytes=sum(entry.bytes for entry in held) or stats.bytes,
        capacity_bytes=stats.capacity_bytes,
        oldest_s=max(ages, default=None),
        problem=problem,
    )


def state_table(state: State) -> RenderableType:
    rows = Table(box=None, pad_edge=False, show_header=False)
    reach = Text("up", "green") if state.is_reachable else Text("does not answer", "red")
    rows.add_row("store", reach + Text(f", asked for {human_time(state.answer_s)}", ""))
    rows.add_row("pages", f"{state.pages:,}")
    rows.add_row("checkpoints", f"{state.checkpoints:,}")
    of = f" of {human_bytes(state.capacity_bytes)}" if state.capacity_bytes else ""
    rows.add_row("size", human_bytes(state.bytes) + of)
    if state.oldest_s is not None:
        rows.add_row("least used", f"{human_time(state.oldest_s)} ago")
    return Group(rows, Text(state.problem, "red")) if state.problem else rows


async def fetch(store: PageStore, key: ObjectKey) -> tuple[Got, bytearray]:
    """Get an object and verify its seal; return the outcome and the body of a hit. A damaged object is
    deleted, as by any other get."""
    sizes = {entry.key: entry.bytes - SEAL_BYTES for entry in await store.list_objects()}
    if key not in sizes:
        return Got.MISS, bytearray()
    body = bytearray(max(sizes[key], 0))
    [outcome] = await store.get([(key, memoryview(body))])
    return outcome, body


async def remove(store: PageStore, keys: Sequence[ObjectKey]) -> int:
    """Remove objects; return how many of them the store had and no longer has."""
    before = await store.contains(keys)
    await store.remove(keys)
    after = await store.contains(keys)
    return sum(was and not still for was, still in zip(before, after, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Calls of one operation with `batch` objects of `object_bytes` each; `best_s` is the fastest call."""

    operation: str
    object_bytes: int
    batch: int
    calls: int
    mean_s: float
    best_s: float
    outcomes: dict[str, int]

    @property
    def bytes_per_s(self) -> float:
        return 0.0 if self.operation == "contains" else self.object_bytes * self.batch / self.best_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The measurements to make: each size with each batch that fits into `bytes_max`."""

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    bytes_max: int
    calls_max: int = 20


async def measure(
    store: PageStore, bench: Bench, rng: Random, clock: Callable[[], float]
) -> list[Measurement]:
    """Measure the store with random keys, whose objects are removed again."""
    measurements: list[Measurement] = []
    memory = memoryview(bytearray(bench.bytes_max))
    store.register(memory)
    noise = rng.randbytes(1 << 20)
    for start in range(0, len(memory), len(noise)):
        memory[start : start + len(noise)] = noise[: len(memory) - start]
    for object_bytes in bench.sizes:
        for batch in bench.batches:
            calls = min(bench.calls_max, bench.bytes_max // (object_bytes * batch))
            if calls:
                measurements += await _measure(store, memory, (object_bytes, batch, calls), rng, clock)
    return measurements


async def _measure(
    store: PageStore,
    memory: memoryview,
    shape: tuple[int, int, int],
    rng: Random,
    clock: Callable[[], float],
) -> list[Measurement]:
    object_bytes, batch, calls = shape
    durations_s: dict[str, list[float]] = {"put": [], "contains": [], "get": []}
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in durations_s}
    for _ in range(calls):
        objects = [
            (
                ObjectKey(Kind.PAGE, PageKey(rng.randbytes(DIGEST_BYTES))),
                memory[index * object_bytes : (index + 1) * object_bytes],
            )
            for index in range(batch)
        ]
        keys = [key for key, _ in objects]
        operations: list[tuple[str, Awaitable[Sequence[Put | Got | bool]]]] = [
            ("put", store.put(objects)),
            ("contains", store.contains(keys)),
            ("get", store.get(objects)),
        ]
        for name, operation in operations:
            started = clock()
            results = await operation
            durations_s[name].append(clock() - started)
            outcomes[name].update(_outcome_name(result) for result in results)
        await store.remove(keys)
    return [
        Measurement(
            operation=name,
            object_bytes=object_bytes,
            batch=batch,
            calls=calls,
            mean_s=sum(times) / len(times),
            best_s=max(min(times), 1e-9),
            outcomes=dict(outcomes[name]),
        )
        for name, times in durations_s.items()
    ]


def measurements_json(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [{**asdict(row), "bytes_per_s": row.bytes_per_s} for row in measurements]


def measurements_table(measurements: Sequence[Measurement]) -> Table:
    """Return a row for each measurement; throughput is that of the fastest call."""
    rows = table(("", "objects of", "batch", "calls", "mean", "best", "per second", "outcomes"), num_left=1)
    for row in measurements:
        rate = f"{row.batch / row.best_s:,.0f} keys" if not row.bytes_per_s else human_bytes(row.bytes_per_s)
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(row.outcomes.items()))
        rows.add_row(
            row.operation,
            human_bytes(row.object_bytes),
            str(row.batch),
            str(row.calls),
            human_time(row.mean_s),
            human_time(row.best_s),
            rate,
            outcomes,
        )
    return rows


def _outcome_name(result: Put | Got | bool) -> str:  # noqa: FBT001 - the result of any operation
    if isinstance(result, bool):
        return "there" if result else "absent"
    return result.value


def human_time(seconds: float) -> str:
    """Return a time with two or three digits and a unit: `1.5 ms`, `42 s`, `3.0 h`."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= unit_s:
            count = seconds / unit_s
            return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"
