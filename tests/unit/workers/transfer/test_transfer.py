"""Groups of unequal size read what each other wrote: byte patterns through real stores."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.workers.bench import IN_VIRTUAL_TIME
from tests.support.workers.timed_store import TimedStore
from tidemill.kvstore.keys import Kind, Namespace, ObjectKey, PageKey, page_keys
from tidemill.kvstore.layout import (
    Attention,
    Latent,
    LayerSpec,
    Linear,
    PageId,
    StateDtype,
    StateId,
    Window,
    WindowId,
    layout_of,
)
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.shards import Shards, rank_layers, rank_share, shards_of
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import LOOK_S, Got, PageStore, Put
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Mate, Moved, Quota, RankTransfer, Transfer

P = 2
NUM_PAGES = 5
PAGES, TAIL, SLOT = [PageId(number) for number in (9, 2, 7, 3, 4)], PageId(6), StateId(10)
STORE_BYTES = 1 << 20
LAYERS = (
    Linear(key_heads=4, value_heads=8, key_dim=1, value_dim=2, conv_width=2),
    Attention(kv_heads=2, head_dim=2),
    Attention(kv_heads=2, head_dim=1),
)
COPIED = (Linear(key_heads=4, value_heads=8, key_dim=1, value_dim=16, conv_width=2), *LAYERS[1:])
ATTENTION_ONLY = LAYERS[1:]
WINDOWED = (Attention(kv_heads=2, head_dim=2), Window(kv_heads=4, head_dim=1, tokens=P + 2))
LATENT = (Latent(width=3), Latent(width=5))
SEEN = range(3, NUM_PAGES)
KEYS = page_keys(Namespace(model="m", layout="l").root(), range(P * NUM_PAGES), P)
NOISE = 0xEE


class Watched(MemoryStore):
    """Remembers what it was offered and stored, in order; `refuses` and `loses` choose among the objects."""

    def __init__(self) -> None:
        super().__init__(STORE_BYTES)
        self.stored: list[ObjectKey] = []
        self.refuses: Callable[[ObjectKey], bool] = lambda _: False
        self.loses: Callable[[ObjectKey], bool] = lambda _: False

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        await asyncio.sleep(0)
        outcomes: list[Put] = []
        for key, body in objects:
            full = Put.FULL in outcomes or self.refuses(key)
            outcomes += [Put.FULL] if full else await super().put([(key, body)])
            if outcomes[-1] is Put.STORED:
                self.stored.append(key)
        return outcomes

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        for key, _ in wanted:
            if self.loses(key) and key in self.objects:
                self.forget(key)
        return await super().get(wanted)


class Group:
    """`size` ranks with an arena each, in one process; their store clients are the same one."""

    def __init__(
        self, store: PageStore, size: int, shards: Shards, layers: Sequence[LayerSpec] = LAYERS
    ) -> None:
        copied: StateDtype | None = "bfloat16" if layers is COPIED else None
        sizes = partial(layout_of, checkpoint_dtype=copied, extent_bytes_min=1 << 10, granule_bytes=1)
        self.whole, self.layout = sizes(layers, P), sizes(rank_layers(layers, size), P)
        self.size = size
        self.late: list[asyncio.Future[int]] = []
        num_bytes = max(self.layout.page_bytes, self.layout.state_stride_bytes)
        self.windows: list[WindowId] = []
        if self.layout.has_windows:  # behind the pages
            first = -(-10 * self.layout.page_bytes // self.layout.window_bytes)
            self.windows = [WindowId(first + 3), WindowId(first + 1)]
        self.arenas = [bytearray([NOISE]) * (20 * num_bytes) for _ in range(size)]
        self.mates: list[Mate] = [
            RankTransfer(self.layout, DirectIO(store, memoryview(arena)), rank_share(shards, rank, size))
            for rank, arena in enumerate(self.arenas)
        ]
        self.lead(self.mates[1:], store, shards)

    def lead(self, mates: Sequence[Mate], store: PageStore, shards: Shards) -> None:
        """The first rank leads these."""
        places = DirectIO(store, memoryview(self.arenas[0]))
        self.transfer = Transfer(self.layout, places, shards, mates)

    async def publish(self) -> bool:
        """Fill the pages and the state of each rank with its part of the pattern, and publish them."""
        for arena, places in zip(self.arenas, self._places(), strict=True):
            for place, pattern in places:
                arena[place] = pattern
        return await self.transfer.publish(self._published(), KEYS, 0, checkpoint=True)

    async def restore(self, reused_pages: int = 0) -> int:
        """Fetch all pages from `reused_pages` on and, for a hybrid, the checkpoint at the end."""
        lease = Lease(P, private_pages=[*PAGES[reused_pages:], TAIL])
        lease.held[self.layout.saved].append(SLOT)
        if self.layout.has_windows:
            lease.windows, lease.first_window, lease.fetched_windows = self.windows, SEEN.start, SEEN
        lease.shared_entries = self._published().shared_entries[:reused_pages]
        return await self.transfer.fetch(lease, KEYS, NUM_PAGES, self.late.append)

    def check(self) -> None:
        """The pattern is where it belongs, and nothing else was touched."""
        for arena, places in zip(self.arenas, self._places(), strict=True):
            expected = bytearray([NOISE]) * len(arena)
            for place, pattern in places:
                expected[place] = pattern
            assert arena == expected

    def _published(self) -> Lease:
        entries: list[Entry] = []
        for depth, (key, page) in enumerate(zip(KEYS, PAGES, strict=True), 1):
            entries.append(Entry(key, entries[-1] if entries else None, depth, page))
        if self.layout.hybrid:
            states: dict[str, Any] = {self.layout.saved: (SLOT,)} if self.layout.has_states else {}
            entries[-1].checkpoint = Checkpoint(windows=tuple(self.windows), **states)
        return Lease(P, shared_entries=entries, source=entries[-1])

    def _places(self) -> Iterator[list[tuple[slice, bytes]]]:
        """Yield, for each rank, where its bytes of each object lie, and the bytes."""
        layout, whole = self.layout, self.whole
        kv_heads = whole.attention[0].kv_heads if whole.attention else 1
        for rank in range(self.size):
            head_bytes = whole.page_bytes // kv_heads
            first = rank * kv_heads // self.size * head_bytes
            places: list[tuple[slice, int, bytes]] = [
                (_span(layout.page_offset(page), layout.page_bytes), first, _pattern(key, whole.page_bytes))
                for key, page in zip(KEYS, PAGES, strict=True)
            ]
            for place, window in zip(SEEN, self.windows, strict=False):
                span = _span(layout.window_offset(window), layout.window_bytes)
                heads = whole.windows[0].kv_heads
                first = rank * heads // self.size * (whole.window_bytes // heads)
                places.append((span, first, _pattern(b"w" + KEYS[place], whole.window_bytes)))
            if layout.has_states:
                span = _span(SLOT * layout.saved_stride_bytes, layout.saved_bytes)
                places.append((span, rank * layout.saved_bytes, _pattern(b"state", whole.saved_bytes)))
            yield [(span, pattern[first : first + span.stop - span.start]) for span, first, pattern in places]


def _span(offset: int, num_bytes: int) -> slice:
    return slice(offset, offset + num_bytes)


def _pattern(seed: bytes, num_bytes: int) -> bytes:
    return Random(seed).randbytes(num_bytes)


UNEQUAL = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (4, 4)]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize(
    "layers",
    [LAYERS, COPIED, ATTENTION_ONLY, WINDOWED, LATENT],
    ids=["hybrid", "copied", "attention", "windows", "latents"],
)
@pytest.mark.parametrize(("writers", "readers"), UNEQUAL)
async def test_group_reads_pages_of_a_group_of_another_size(
    writers: int, readers: int, layers: tuple[LayerSpec, ...], kind: str, tmp_path: Path
) -> None:
    shards = shards_of(layers, {writers, readers})

    store = MemoryStore(STORE_BYTES) if kind == "memory" else FileStore(tmp_path, STORE_BYTES)
    one, other = Group(store, writers, shards, layers), Group(store, readers, shards, layers)
    assert not await other.transfer.holds(KEYS)
    assert await one.publish()
    assert await other.transfer.holds(KEYS)
    depths = [NUM_PAGES] if other.layout.hybrid else list(range(1, NUM_PAGES + 1))
    assert await other.transfer.restorable_depths(KEYS, 0) == depths
    assert await other.restore() == NUM_PAGES
    other.check()
    stats = store.stats()
    windows = len(SEEN) * other.layout.has_windows
    objects = NUM_PAGES * shards.pages + other.layout.has_states * shards.states
    objects += windows * shards.windows
    assert stats.puts == stats.objects == objects, "what is replicated is published once"
    gets = NUM_PAGES * max(readers, shards.pages) + other.layout.has_states * shards.states
    gets += windows * max(readers, shards.windows)
    assert stats.gets == stats.hits == gets
    await store.close()


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_cached_pages_are_not_fetched(size: int) -> None:
    store, shards = Watched(), shards_of(LAYERS, {2, 4})
    one, other = Group(store, 2, shards), Group(store, size, shards)
    await one.publish()
    await one.publish()
    assert max(Counter(store.stored).values()) == 1
    assert await other.restore(reused_pages=NUM_PAGES) == NUM_PAGES
    assert store.stats().gets == shards.states
    assert await other.restore(reused_pages=2) == NUM_PAGES


SHARDS = shards_of(LAYERS, {1, 2, 4})
OBJECTS: list[tuple[tuple[LayerSpec, ...], ObjectKey]] = [
    *((LAYERS, ObjectKey(Kind.PAGE, KEYS[page], shard)) for page in (0, 3) for shard in range(2)),
    *((LAYERS, ObjectKey(Kind.CHECKPOINT, KEYS[-1], shard)) for shard in range(4)),
    *((WINDOWED, ObjectKey(Kind.PAGE, KEYS[page], 1)) for page in (0, 3)),
    *((WINDOWED, ObjectKey(Kind.WINDOW, KEYS[page], 3)) for page in SEEN),
]


@pytest.mark.parametrize(("layers", "key"), OBJECTS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "damaged"])
async def test_one_bad_shard_on_one_rank_is_a_miss_for_the_group(
    layers: tuple[LayerSpec, ...], key: ObjectKey, size: int, *, is_lost: bool
) -> None:
    """Lost after the store was asked, or damaged: either way the depth before it is what remains. A
    checkpoint has a hole without one of its windows."""
    store, shards = Watched(), shards_of(layers, {1, 2, 4})
    one, other = Group(store, 1, shards, layers), Group(store, size, shards, layers)
    await one.publish()
    if is_lost:
        store.loses = lambda other_key: other_key == key
    else:
        store.objects[key][-1] ^= 1
    good = KEYS.index(key.key) if key.kind is Kind.PAGE else NUM_PAGES - 1
    assert await other.restore() == good
    assert not await other.transfer.holds(KEYS)
    if key.kind is not Kind.PAGE:
        assert await other.transfer.restorable_depths(KEYS, 0) == []
    store.loses = lambda _: False
    assert await one.publish(), "the missing shard alone is stored again"
    assert store.stored.count(key) == 2
    assert max(Counter(store.stored).values()) == 2
    assert await other.restore() == NUM_PAGES
    other.check()


@pytest.mark.parametrize("shard", [0, 1])
async def test_page_without_one_of_its_shards_ends_the_run(shard: int) -> None:
    store, shards = MemoryStore(STORE_BYTES), shards_of(ATTENTION_ONLY, {2})
    one = Group(store, 2, shards, ATTENTION_ONLY)
    await one.publish()
    store.forget(ObjectKey(Kind.PAGE, KEYS[2], shard))
    assert await one.transfer.restorable_depths(KEYS, 0) == [1, 2]
    assert await one.transfer.restorable_depths(KEYS, 3) == [4, 5]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("layers", "refused"), OBJECTS, ids=str)
async def test_refused_shard_keeps_every_rank_from_the_checkpoint(
    layers: tuple[LayerSpec, ...], size: int, refused: ObjectKey
) -> None:
    """A stored shard of a checkpoint implies that every shard of every page is stored."""
    store = Watched()
    store.refuses = lambda key: key == refused
    one = Group(store, size, shards_of(layers, {1, 2, 4}), layers)
    assert not await one.publish()
    assert not await one.transfer.holds(KEYS)
    checkpoints = [key for key in store.stored if key.kind is not Kind.PAGE]
    assert refused not in checkpoints
    assert refused.kind is not Kind.PAGE or not checkpoints
    store.refuses = lambda _: False
    assert await one.publish()
    assert await one.transfer.holds(KEYS)


class Slow:
    """A rank that answers when it is let, and never ends a call before."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.busy = 0
        self.called = asyncio.Event()
        self.let = asyncio.Event()

    async def put(self, objects: Sequence[Moved]) -> int:
        return await self.get(objects)

    async def get(self, objects: Sequence[Moved]) -> int:
        self.busy += 1
        self.called.set()
        try:
            while not self.let.is_set():
                with suppress(asyncio.CancelledError):
                    await self.let.wait()
        finally:
            self.busy -= 1
        return min(self.answer, len(objects))


def _with_a_slow_mate(patience_s: float = math.inf) -> tuple[Group, Slow]:
    slow = Slow(NUM_PAGES)
    store = TimedStore(patience=patience_s)
    store.opened = slow.let
    one = Group(store, 2, SHARDS)
    one.lead([slow], one.transfer.store, SHARDS)
    return one, slow


@IN_VIRTUAL_TIME
@pytest.mark.parametrize("reused_pages", [0, 2, NUM_PAGES])
async def test_fetch_that_finds_no_place_in_the_quota_has_fetched_nothing(reused_pages: int) -> None:
    """Least of all the checkpoint, where all pages are here."""
    store = TimedStore(patience=3.0)
    one = Group(store, 1, SHARDS)
    places = DirectIO(one.transfer.store, memoryview(one.arenas[0]))
    one.transfer = Transfer(one.layout, places, SHARDS, in_flight_bytes_max=1)
    await one.publish()
    store.opened.clear()
    first = asyncio.ensure_future(one.restore())
    await asyncio.sleep(1.0)
    second = asyncio.ensure_future(one.restore(reused_pages))
    assert await first == 0
    assert await second == min(reused_pages, NUM_PAGES - 1)
    store.opened.set()
    for moving in one.late:
        await moving


async def test_cancelled_fetch_leaves_its_transfer_to_the_owner_of_the_memory() -> None:
    one, slow = _with_a_slow_mate()
    task = asyncio.ensure_future(one.restore())
    await slow.called.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    [moving] = one.late
    assert slow.busy
    assert not moving.done()
    slow.let.set()
    await moving
    assert not slow.busy


@IN_VIRTUAL_TIME
async def test_fetch_ends_when_it_is_not_worth_waiting_for_any_more() -> None:
    one, slow = _with_a_slow_mate(patience_s=3.0)
    began_s = asyncio.get_running_loop().time()
    assert await one.restore() == 0
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(3.0)
    [moving] = one.late
    assert not moving.done()
    slow.let.set()
    await moving
    assert await one.restore() == 0, "in time: what the store does not have is a miss"
    assert len(one.late) == 1


@IN_VIRTUAL_TIME
@pytest.mark.parametrize("patience_s", [3.0, 30.0])
async def test_fetch_and_publication_end_when_the_store_goes_down(patience_s: float) -> None:
    one, slow = _with_a_slow_mate(patience_s)
    store = one.transfer.store
    assert isinstance(store, TimedStore)
    began_s = asyncio.get_running_loop().time()
    fetching = asyncio.ensure_future(one.restore())
    publishing = asyncio.ensure_future(slow.let.wait())
    published = asyncio.ensure_future(one.transfer.wait_published(publishing, 1))
    await asyncio.sleep(1.0)
    assert not fetching.done()
    assert not published.done()
    store.patience = 0.0
    assert await fetching == 0
    await published
    assert asyncio.get_running_loop().time() - began_s < 1.0 + 2 * LOOK_S
    slow.let.set()
    await asyncio.gather(publishing, *one.late)


@IN_VIRTUAL_TIME
async def test_no_more_bytes_are_in_flight_than_the_quota() -> None:
    quota, rng = Quota(100), Random(1)
    in_flight = most = 0

    async def move(num_bytes: int) -> None:
        nonlocal in_flight, most
        await asyncio.sleep(rng.random())
        await quota.take(num_bytes)
        in_flight += num_bytes
        most = max(most, in_flight)
        assert in_flight <= max(100, num_bytes)
        try:
            await asyncio.sleep(rng.random())
        finally:
            in_flight -= num_bytes
            quota.give_back(num_bytes)

    moves = [asyncio.ensure_future(move(rng.choice([1, 30, 60, 100, 250]))) for _ in range(300)]
    for task in rng.sample(moves, 60):
        await asyncio.sleep(rng.random() / 20)
        task.cancel()
    await asyncio.wait(moves)
    assert most > 90
    assert quota.wanted_bytes == 0
    await asyncio.wait_for(quota.take(100), 1.0)


async def test_cancelled_publication_ends_when_every_rank_has_left_its_memory() -> None:
    one, slow = _with_a_slow_mate()
    task = asyncio.ensure_future(one.publish())
    await slow.called.wait()
    try:
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
    finally:
        slow.let.set()
        await asyncio.wait({task})
    assert task.cancelled()
    assert not slow.busy


@pytest.mark.parametrize("broken", [1, 2, 3])
async def test_mate_whose_link_is_broken_is_a_loss(broken: int) -> None:
    store = Watched()
    one = Group(store, 4, SHARDS)
    await one.publish()
    gone = Slow(0)
    gone.let.set()
    one.mates[broken] = gone
    one.lead(one.mates[1:], store, SHARDS)
    assert await one.restore() == 0
    store.objects.clear()
    assert not await one.publish()
    assert not any(key.kind is Kind.CHECKPOINT for key in store.objects)


async def test_rank_that_publishes_no_pages_has_no_part_in_their_loss() -> None:
    store, shards = Watched(), shards_of(LAYERS, {4})
    one = Group(store, 4, shards)
    pages = [Moved(Kind.PAGE, key, page) for key, page in zip(KEYS, PAGES, strict=True)]
    state = Moved(Kind.CHECKPOINT, PageKey(KEYS[-1]), SLOT)
    assert await one.mates[1].put([*pages, state]) == NUM_PAGES + 1
    assert store.stored == [ObjectKey(Kind.CHECKPOINT, KEYS[-1], 1)]
    assert await one.mates[1].put([]) == await one.mates[1].get([]) == 0
    store.objects.clear()
    store.refuses = lambda key: key.kind is Kind.CHECKPOINT
    assert await one.mates[1].put([*pages, state]) == NUM_PAGES
