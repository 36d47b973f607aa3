"""The texts that name a store, and one-line errors for other texts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.kvstore.objects import page
from tests.support.kvstore.store_process import body
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores import open_store as module
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.mooncake_store import TCP, Transport
from tidemill.kvstore.stores.open_store import open_store
from tidemill.kvstore.stores.page_store import Got, PageStore, Put, StoreStats
from tidemill.kvstore.stores.seal import PLAIN, SECRET_BYTES, Sealing
from tidemill.kvstore.stores.tiered_store import TieredStore


def open_stats(url: str, kind: type) -> StoreStats:
    store = open_store(url)
    assert type(store) is kind
    asyncio.run(store.close())
    return store.stats()


@pytest.mark.parametrize(
    ("url", "capacity_bytes"),
    [("memory:", 1 << 30), ("memory", 1 << 30), ("memory:?size=64KiB", 1 << 16)],
)
def test_open_store_opens_memory(url: str, capacity_bytes: int) -> None:
    assert open_stats(url, MemoryStore).capacity_bytes == capacity_bytes


@pytest.mark.parametrize(
    ("form", "folder", "kind"),
    [
        ("file://{}?size=2MiB", "cache", GuardedStore),
        ("file:{}?size=2MiB", "cache", GuardedStore),
        ("{}?size=2MiB", "cache", GuardedStore),
        ("file://{}%20b%2Cc?size=2MiB", "cache b,c", GuardedStore),
        ("{}?size=2MiB&write=none", "cache", TieredStore),
    ],
)
def test_open_store_opens_files(form: str, folder: str, kind: type, tmp_path: Path) -> None:
    assert open_stats(form.format(tmp_path / "cache"), kind).capacity_bytes == 2 << 20
    assert (tmp_path / folder / "objects").is_dir()


def test_open_store_bounds_a_path_without_a_size_by_its_file_system(tmp_path: Path) -> None:
    assert 0 < open_stats(str(tmp_path / "not" / "yet"), GuardedStore).capacity_bytes <= 8 << 30


@pytest.mark.parametrize(
    ("option", "patience_s"),
    [("", 2.0), ("&timeout=250ms", 0.25), ("&timeout=60s", 60.0), ("&timeout=3", 3.0)],
)
def test_open_store_limits_the_wait_for_a_hanging_file_store(
    tmp_path: Path, option: str, patience_s: float
) -> None:
    store = open_store(f"file://{tmp_path}?size=1MiB{option}")
    assert store.patience_s(0) == pytest.approx(patience_s)
    asyncio.run(store.close())


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Record the Mooncake stores that are joined."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def join(master: str, **options: Any) -> PageStore:  # noqa: ANN401 - any options of open_store
        calls.append((master, options))
        return MemoryStore(1 << 20)

    monkeypatch.setattr(module, "open_mooncake", join)
    return calls


def test_open_store_joins_a_mooncake_store(joined: list[tuple[str, dict[str, Any]]]) -> None:
    open_stats("mooncake://host:1", GuardedStore)
    options = "protocol=rdma&device=mlx5_0%2Cmlx5_1&ports=open&admin=host:3&lease=2s"
    open_stats(f"mooncake://host:2?{options}", GuardedStore)
    plain = {"transport": TCP, "admin": "", "lease_s": 10.0, "sealing": PLAIN}
    transport = Transport("rdma", "mlx5_0,mlx5_1", is_open=True)
    rdma = {"transport": transport, "admin": "host:3", "lease_s": 2.0, "sealing": PLAIN}
    assert joined == [("host:1", plain), ("host:2", rdma)]


async def test_open_store_orders_tiers_as_written(
    tmp_path: Path, joined: list[tuple[str, dict[str, Any]]]
) -> None:
    sealing = Sealing(bytes(SECRET_BYTES))
    memory = bytearray(100)
    store = open_store(
        f"memory:?size=1MiB&write=hits,file://{tmp_path}/one?size=3MiB,mooncake://host:1?write=none",
        sealing,
    )
    assert isinstance(store, TieredStore)
    assert store.stats().capacity_bytes == 5 << 20
    assert store.patience_s(0) == pytest.approx(2.25)
    assert await store.put([(page(1), memoryview(body(1, 1, 100)))]) == [Put.STORED]
    assert store.stats().objects == 1, "a tier was written against its policy"
    await store.close()
    reopened = open_store(f"file://{tmp_path}/one", sealing)
    assert await reopened.get([(page(1), memoryview(memory))]) == [Got.HIT]
    await reopened.close()
    unsealed = open_store(f"file://{tmp_path}/one")
    assert await unsealed.get([(page(1), memoryview(memory))]) == [Got.CORRUPT]
    await unsealed.close()
    assert joined[0][1]["sealing"] is sealing


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("mooncake", "only tidemill serve starts a master: join one with mooncake://host:port"),
        ("mooncake:?timeout=1s", "only tidemill serve starts a master"),
        ("mooncake://host:1?size=1GiB", "for those who start it: tidemill serve"),
        ("mooncake://host:1?protocol=ib", "protocol is tcp or rdma, not 'ib'"),
        ("mooncake://host:1?ports=no", "ports is kept or open, not 'no'"),
        ("mooncake://host:1?timeout=soon", "write it like 250ms or 2s"),
        ("redis://host", "there is no store 'redis': use memory:"),
        ("mooncacke", "there is no store 'mooncacke': use memory:"),
        ("memory:?size=lots", "write it like 512MiB"),
        ("memory:?size=", "write it like 512MiB"),
        ("memory:?sise=1GiB", "there is no option 'sise': memory has size, write"),
        ("memory:?timeout=1s", "there is no option 'timeout': memory has"),
        ("memory:?size=1g&size=2g", "size is given twice: leave one"),
        ("file://host/path", "three slashes"),
        ("file:", "three slashes"),
        ("", "three slashes"),
        ("/proc/none?size=1MiB", "name a folder that this user may write to"),
        ("/proc/none?timeout=0", "write it like 250ms or 2s"),
        ("/proc/none?timeout=-1s", "write it like 250ms or 2s"),
        ("/proc/none?write=back", "write is one of all, hits, none, not 'back'"),
        ("/proc/none,memory:", "memory is nearer than all other tiers: name it first"),
        ("memory:,/proc/none?size=1MiB", "name a folder that this user may write to"),
        ("memory:,", "three slashes"),
        ("memory:,cache", "there is no store 'cache'"),
    ],
)
def test_open_store_refuses_other_texts_with_the_fix(url: str, fix: str) -> None:
    with pytest.raises(StoreError, match=fix) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)
