"""`tidemill store`: what operators ask a page store, and how fast it is. Knows no options."""

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
from tidemill.kvstore.stores.open_store import open_store
from tidemill.kvstore.stores.page_store import Got, PageStore, Put, StoredObject
from tidemill.kvstore.stores.seal import SEAL_BYTES, Sealing

_Result = TypeVar("_Result")

TIMEOUT = "timeout=60s"
"""For a person who waits; a worker would rather compute."""

NAMES = {Kind.PAGE: "page", Kind.WINDOW: "window page", Kind.CHECKPOINT: "checkpoint"}


def with_store(url: str, sealing: Sealing, work: Callable[[PageStore], Awaitable[_Result]]) -> _Result:
    """What `work` makes of the store. Raises StoreError."""
    if all(tier.startswith("memory") for tier in url.split(",")):
        raise StoreError(
            "store memory: is inside one process, which is not this one: look at a file or mooncake"
        )

    async def run() -> _Result:
        store = open_store(_patient(url), sealing)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _patient(url: str) -> str:
    """With `TIMEOUT` for each tier that can have one and has none."""
    tiers = (
        tier
        if "timeout=" in tier or tier.startswith("memory")
        else f"{tier}{'&' if '?' in tier else '?'}{TIMEOUT}"
        for tier in url.split(",")
    )
    return ",".join(tiers)


async def listed(store: PageStore) -> list[StoredObject]:
    """Everything that it holds, what was used last first."""
    return sorted(await store.list_objects(), key=lambda held: (held.used_s or 0.0, str(held.key)))


def listed_json(found: Sequence[StoredObject]) -> list[dict[str, Any]]:
    return [
        {
            "key": str(held.key),
            "kind": NAMES[held.key.kind],
            "shard": held.key.shard,
            "bytes": held.bytes,
            "used_s": held.used_s,
        }
        for held in found
    ]


def listed_table(found: Sequence[StoredObject]) -> Table:
    rows = table(("key", "kind", "shard", "size", "unused"), num_left=2)
    rows.columns[0].overflow = "fold"  # to be copied
    for held in found:
        used = "" if held.used_s is None else human_time(held.used_s)
        rows.add_row(str(held.key), NAMES[held.key.kind], str(held.key.shard), human_bytes(held.bytes), used)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A store at a glance. `bytes` and the counts are 0 when it cannot tell."""

    is_reachable: bool
    answer_s: float  # of a get of something that is nowhere
    pages: int
    checkpoints: int
    bytes: int
    capacity_bytes: int
    oldest_s: float | None  # since the use that is longest ago
    problem: str = ""


async def state_of(store: PageStore, clock: Callable[[], float]) -> State:
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
    kinds = Counter(one.key.kind for one in held)
    ages = [one.used_s for one in held if one.used_s is not None]
    return State(
        is_reachable=not stats.is_down and got is not Got.UNREACHABLE,
        answer_s=answer_s,
        pages=kinds[Kind.PAGE],
        checkpoints=kinds[Kind.CHECKPOINT],
        bytes=sum(one.bytes for one in held) or stats.bytes,
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
    """The body of an object, its seal verified, when it is a hit. A damaged one is deleted, as by any other
    get."""
    sizes = {held.key: held.bytes - SEAL_BYTES for held in await store.list_objects()}
    if key not in sizes:
        return Got.MISS, bytearray()
    body = bytearray(max(sizes[key], 0))
    [outcome] = await store.get([(key, memoryview(body))])
    return outcome, body


async def forget(store: PageStore, keys: Sequence[ObjectKey]) -> int:
    """How many of them it held, and holds no longer."""
    before = await store.contains(keys)
    await store.remove(keys)
    after = await store.contains(keys)
    return sum(was and not still for was, still in zip(before, after, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Calls of one kind with `batch` objects of `object_bytes` each. Best: of its calls, the fastest."""

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
    """What to measure: each size with each batch that fits into `bytes_max`."""

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    bytes_max: int
    calls_max: int = 20


async def measure(store: PageStore, bench: Bench, rng: Random, clock: Callable[[], float]) -> list[Measured]:
    """Under keys of its own, which it removes."""
    found: list[Measured] = []
    memory = memoryview(bytearray(bench.bytes_max))
    store.register(memory)
    noise = rng.randbytes(1 << 20)
    for start in range(0, len(memory), len(noise)):
        memory[start : start + len(noise)] = noise[: len(memory) - start]
    for object_bytes in bench.sizes:
        for batch in bench.batches:
            calls = min(bench.calls_max, bench.bytes_max // (object_bytes * batch))
            if calls:
                found += await _measured(store, memory, (object_bytes, batch, calls), rng, clock)
    return found


async def _measured(
    store: PageStore,
    memory: memoryview,
    shape: tuple[int, int, int],
    rng: Random,
    clock: Callable[[], float],
) -> list[Measured]:
    object_bytes, batch, calls = shape
    took: dict[str, list[float]] = {"put": [], "contains": [], "get": []}
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in took}
    for _ in range(calls):
        objects = [
            (
                ObjectKey(Kind.PAGE, PageKey(rng.randbytes(DIGEST_BYTES))),
                memory[index * object_bytes : (index + 1) * object_bytes],
            )
            for index in range(batch)
        ]
        keys = [key for key, _ in objects]
        questions: list[tuple[str, Awaitable[Sequence[Put | Got | bool]]]] = [
            ("put", store.put(objects)),
            ("contains", store.contains(keys)),
            ("get", store.get(objects)),
        ]
        for name, question in questions:
            started = clock()
            answers = await question
            took[name].append(clock() - started)
            outcomes[name].update(_word(answer) for answer in answers)
        await store.remove(keys)
    return [
        Measured(
            operation=name,
            object_bytes=object_bytes,
            batch=batch,
            calls=calls,
            mean_s=sum(times) / len(times),
            best_s=max(min(times), 1e-9),
            outcomes=dict(outcomes[name]),
        )
        for name, times in took.items()
    ]


def measured_json(found: Sequence[Measured]) -> list[dict[str, Any]]:
    return [{**asdict(one), "bytes_per_s": one.bytes_per_s} for one in found]


def measured_table(found: Sequence[Measured]) -> Table:
    """Throughput is that of the fastest call."""
    rows = table(("", "objects of", "batch", "calls", "mean", "best", "per second", "outcomes"), num_left=1)
    for one in found:
        rate = f"{one.batch / one.best_s:,.0f} keys" if not one.bytes_per_s else human_bytes(one.bytes_per_s)
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(one.outcomes.items()))
        rows.add_row(
            one.operation,
            human_bytes(one.object_bytes),
            str(one.batch),
            str(one.calls),
            human_time(one.mean_s),
            human_time(one.best_s),
            rate,
            outcomes,
        )
    return rows


def _word(answer: Put | Got | bool) -> str:  # noqa: FBT001 - one of three kinds of answers
    if isinstance(answer, bool):
        return "there" if answer else "absent"
    return answer.value


def human_time(seconds: float) -> str:
    """A time with two or three digits and a unit: `1.5 ms`, `42 s`, `3.0 h`."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= unit_s:
            count = seconds / unit_s
            return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"
