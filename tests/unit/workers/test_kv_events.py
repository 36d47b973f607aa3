"""Subscribers that read KV events as vLLM does mirror the prefix index, also after they lost batches."""

import sys
from collections import Counter, deque
from contextlib import ExitStack
from pathlib import Path
from random import Random
from time import time
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.workers.bench import HYBRID, IN_VIRTUAL_TIME, LAYOUTS, Bench, a_request, bench, root_of
from tests.support.workers.settings import plain_settings
from tests.support.workers.subscriber import Mirror, documented_subscriber
from tidemill.kvstore.keys import PageKey, chain
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.workers.engine import build, kv_events
from tidemill.workers.engine.kv_events import EventForm, IndexBatch, KvEvents, events_of
from tidemill.workers.engine.zmq_publisher import ZmqPublisher, is_bound, with_rank
from tidemill.workers.settings import KvEventSettings, SettingsError

pytestmark = IN_VIRTUAL_TIME

SALTS = ("", "tenant")


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM 0.32, vllm/distributed/kv_events.py, like the classes below."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Queue:
    """The queue of a publisher, without one: batches are taken from it as they would be sent."""

    def __init__(self, length_max: int = 1 << 20) -> None:
        self.wants_all = False
        self.waiting: deque[IndexBatch] = deque()
        self._length_max = length_max

    def put(self, batch: IndexBatch) -> None:
        self.waiting.append(batch)

    def make_room(self) -> int:
        num = len(self.waiting)
        if num < self._length_max:
            return 0
        self.waiting.clear()
        return num

    def close(self) -> None:
        pass

    def sent(self, form: EventForm) -> list[tuple[int, bytes]]:
        """Take all that waits, as a publisher encodes it."""
        taken, self.waiting = self.waiting, deque()
        return [
            (batch.number, msgspec.msgpack.encode(kv_events.EventBatch(batch.ts, events_of(batch, form), 3)))
            for batch in taken
        ]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return documented_subscriber()


def assert_mirrors(mirror: Mirror, index: PrefixIndex) -> None:
    """The mirror has the pages and the restorable depths of the index, and the tokens of each page."""
    assert mirror.restorable == set(index.restorable_keys())
    assert mirror.pages.keys() == {entry.key for entry in index}
    roots = {root_of(salt) for salt in SALTS}
    for entry in index:
        parent, tokens = mirror.pages[entry.key]
        assert parent == (entry.parent.key if entry.parent is not None else None)
        assert entry.key in {chain(known, tokens) for known in ({PageKey(parent)} if parent else roots)}


async def work(made: Bench, random: Random, number: int) -> None:
    """Answer requests with shared prefixes, in less memory than all of them need."""
    tokens = tuple(random.choices(range(2), k=4)) * random.randint(2, 15)
    salt = random.choice(SALTS)
    await made.answer(a_request(tokens, random.randint(1, 12), salt=salt, request_id=str(number)))


@LAYOUTS
@pytest.mark.parametrize("length_max", [2, 1 << 20], ids=["overflows", "keeps up"])
async def test_mirror_equals_the_index(example: ModuleType, layout: Layout, length_max: int) -> None:
    random, decoder = Random(layout.page_bytes + length_max), msgspec.msgpack.Decoder(example.EventBatch)
    form = EventForm.of(layout, on_cuda=False)
    kinds = Counter[str]()

    async with bench(layout=layout, num_extents=12) as made:
        queue = Queue(length_max)
        counters = Counter[str]()
        events = KvEvents(made.ledger.index, queue, counters, time)
        mirror = example.Mirror()
        for number in range(60):
            await work(made, random, number)
            kinds.update(kind for kind, _ in made.ledger.index.log or ())
            events.flush()
            if number % 5 == 0:
                for sent, payload in queue.sent(form):
                    mirror.take(sent, decoder.decode(payload))
                assert_mirrors(mirror, made.ledger.index)
        kept = sum(entry.checkpoint is not None for entry in made.ledger.index)
        assert kinds["kept"] - kinds["dropped"] == kept
        assert bool(counters["kv_event_batches_dropped"]) == (length_max == 2)

    assert kinds["stored"]
    assert kinds["removed"]
    assert bool(kinds["kept"] and kinds["dropped"]) == layout.hybrid


@LAYOUTS
async def test_vllm_decodes_the_events(layout: Layout) -> None:
    """Each of its fields has what vLLM documents, and the ones of ours do not disturb it."""
    form, queue = EventForm.of(layout, on_cuda=True), Queue()
    decoded: list[KVEventBatch] = []

    async with bench(layout=layout, num_extents=12) as made:
        events = KvEvents(made.ledger.index, queue, Counter(), time)
        for number in range(20):
            await work(made, Random(number), number)
            events.flush()
        decoded.extend(msgspec.msgpack.decode(sent, type=KVEventBatch) for _, sent in queue.sent(form))

    assert decoded[0].events[0] == AllBlocksCleared()
    assert all(batch.data_parallel_rank == 3 and batch.ts > 0 for batch in decoded)
    stored = [event for batch in decoded for event in batch.events if isinstance(event, BlockStored)]
    removed = [event for batch in decoded for event in batch.events if isinstance(event, BlockRemoved)]
    assert {event.group_idx for event in removed} == {event.group_idx for event in stored}
    for event in stored:
        assert event.block_size == layout.page_tokens
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.kv_cache_spec_kind == ("mamba" if event.group_idx else "full_attention")
        assert event.medium == "GPU"
        assert event.extra_keys is None or event.parent_block_hash is None
    assert {(SALTS[1],)} == {keys[0] for event in stored if (keys := event.extra_keys) is not None}


async def test_consecutive_pages_are_one_event() -> None:
    queue, form = Queue(), EventForm.of(HYBRID, on_cuda=False)

    async with bench() as made:
        events = KvEvents(made.ledger.index, queue, Counter(), time)
        await made.answer(a_request(tuple(range(9)) * 5))
        events.flush()
        events.flush()  # nothing has changed

    (batch,) = queue.waiting
    _, pages, *checkpoints = events_of(batch, form)
    assert isinstance(pages, kv_events.BlockStored)
    assert len(pages.block_hashes) >= 11
    assert pages.restorable_depth is None
    depths = [event.restorable_depth for event in checkpoints if isinstance(event, kv_events.BlockStored)]
    assert 44 in depths


@pytest.mark.parametrize("buffer_steps", [2, 10_000], ids=["lost", "replayed"])
async def test_subscriber_that_lost_batches_catches_up(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, buffer_steps: int
) -> None:
    """It comes late, loses batches that a replay may have, and sees the worker start again."""
    monkeypatch.setattr(kv_events, "EVERYTHING_S_MIN", 0.0)
    live, past = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/past"
    settings = KvEventSettings(endpoint=live, replay_endpoint=past, buffer_steps=buffer_steps)
    subscriber = example.Subscriber(live, past)

    async def follow(first: int, count: int, num_lost: int) -> None:
        for number in range(first, first + count):
            await work(made, Random(number), number)
            events.flush()
        for _ in range(num_lost):
            assert subscriber.live.poll(20_000)
            subscriber.live.recv_multipart()
        index, silent = made.ledger.index, 0
        while {entry.key for entry in index} != subscriber.mirror.pages.keys():
            silent = 0 if subscriber.receive(1000) else silent + 1
            assert silent < 60, "the mirror never equals the index"
            events.flush()
        while subscriber.receive(1000):
            pass
        assert_mirrors(subscriber.mirror, index)

    try:
        for num_lost in (3, 0):  # of one worker, and of the next
            async with bench(num_extents=12) as made:
                publisher = ZmqPublisher(settings, EventForm.of(HYBRID, on_cuda=False))
                events = KvEvents(made.ledger.index, publisher, Counter(), time)
                await follow(0, 10, 0)
                await follow(10, 4, num_lost)
                publisher.close()
    finally:
        subscriber.close()


def test_publisher_survives_wrong_requests(tmp_path: Path) -> None:
    settings = KvEventSettings(endpoint=f"ipc://{tmp_path}/live", replay_endpoint=f"ipc://{tmp_path}/past")
    publisher = ZmqPublisher(settings, EventForm.of(HYBRID, on_cuda=False))
    publisher.put(IndexBatch(7, 1.0, clears=True, changes=()))
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{tmp_path}/past")
    try:
        for wrong in ([b""], [b"", b"7"], [b"x", bytes(8)], [b"", bytes(8), b""]):
            client.send_multipart(wrong)
        client.send_multipart([b"", bytes(8)])
        assert client.poll(20_000)
        assert [frame.hex() for frame in client.recv_multipart()[1:3]] == ["", "0000000000000007"]
        assert client.poll(20_000)
        assert client.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        assert not client.poll(0)
    finally:
        context.destroy(linger=0)
        publisher.close()


async def test_missing_pyzmq_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, build.PUBLISHER.partition(":")[0])
    settings = plain_settings(kv_events=KvEventSettings(endpoint=f"ipc://{tmp_path}/live"))

    async with bench() as made:
        missing = pytest.raises(SettingsError, match=r"pip install 'tidemill\[events\]'")
        with ExitStack() as opened, missing:
            build.open_events(settings, made.ledger, opened)


def test_endpoint_that_is_taken_is_refused() -> None:
    context = zmq.Context()
    other = context.socket(zmq.PUB)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(SettingsError, match=rf"cannot listen at tcp://127.0.0.1:{port} .*choose a port"):
            ZmqPublisher(
                KvEventSettings(endpoint=f"tcp://127.0.0.1:{port - 3}", rank=3),
                EventForm.of(HYBRID, on_cuda=False),
            )
    finally:
        context.destroy(linger=0)


def test_endpoints_of_workers() -> None:
    assert with_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert with_rank("tcp://*:0", 2) == "tcp://*:0"
    assert with_rank("ipc:///tmp/kv", 2) == "ipc:///tmp/kv.2"
    assert with_rank("ipc:///tmp/kv", 0) == "ipc:///tmp/kv"
    endpoints = ("tcp://*:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc://x", "tcp://collector:1")
    assert [is_bound(endpoint) for endpoint in endpoints] == [True, True, True, True, False]
    base = KvEventSettings(endpoint="tcp://*:5557", rank=1, stride=2)
    assert [base.of_worker(f"keeper-decode-{index}").rank for index in range(3)] == [1, 3, 5]
