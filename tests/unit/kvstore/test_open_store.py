"""Texts that name a store, and one-line answers to those that do not."""

import asyncio
from pathlib import Path

import pytest

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.file_store import FileStore
from tidemill.kvstore.memory_store import MemoryStore
from tidemill.kvstore.open_store import open_store
from tidemill.kvstore.store import StoreStats


def opened(url: str, kind: type) -> StoreStats:
    store = open_store(url)
    assert isinstance(store, kind)
    asyncio.run(store.close())
    return store.stats()


@pytest.mark.parametrize(
    ("url", "capacity_bytes"),
    [("memory:", 1 << 30), ("memory", 1 << 30), ("memory:?size=64KiB", 1 << 16)],
)
def test_memory(url: str, capacity_bytes: int) -> None:
    assert opened(url, MemoryStore).capacity_bytes == capacity_bytes


@pytest.mark.parametrize("form", ["file://{}?size=2MiB", "file:{}?size=2MiB", "{}?size=2MiB"])
def test_files(form: str, tmp_path: Path) -> None:
    assert opened(form.format(tmp_path / "cache"), FileStore).capacity_bytes == 2 << 20
    assert (tmp_path / "cache" / "objects").is_dir()


def test_a_path_without_a_size_is_bounded_by_its_file_system(tmp_path: Path) -> None:
    assert 0 < opened(str(tmp_path / "not" / "yet"), FileStore).capacity_bytes <= 8 << 30


def test_a_path_may_hold_escaped_characters(tmp_path: Path) -> None:
    opened(f"file://{tmp_path}/a%20b?size=1MiB", FileStore)
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("mooncake://host:1", "not part of this version: use file://"),
        ("mooncake", "not part of this version: use file://"),
        ("redis://host", "there is no store 'redis': use memory:"),
        ("memory:?size=lots", "write it like 512MiB"),
        ("memory:?size=", "write it like 512MiB"),
        ("memory:?sise=1GiB", "its one option is size"),
        ("memory:?size=1g&size=2g", "its one option is size"),
        ("file://host/path", "three slashes"),
        ("file:", "three slashes"),
        ("", "three slashes"),
        ("/proc/none?size=1MiB", "name a folder that this user may write to"),
    ],
)
def test_anything_else_is_refused_in_one_line_with_the_fix(url: str, fix: str) -> None:
    with pytest.raises(StoreError, match=fix) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)
