"""`tidemill store` over a folder shows its objects, and mistakes are one line."""

import asyncio
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.store import Bench, measure, measurements_table, read_state
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.open_store import open_store
from tidemill.kvstore.stores.page_store import Put, StoredObject
from tidemill.kvstore.stores.seal import SEAL_BYTES, Sealing

PAGES = [ObjectKey(Kind.PAGE, PageKey(bytes([1 + index]) * 16), shard=index) for index in range(3)]
CHECKPOINT = ObjectKey(Kind.CHECKPOINT, PageKey(bytes([2]) * 16))
SECRET = bytes(range(32))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a folder with three pages and a checkpoint, sealed with a secret."""
    url = f"file://{tmp_path}/store?size=1MiB"
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)

    async def fill() -> None:
        store = open_store(url, Sealing(SECRET))
        objects = [(key, memoryview(bytes([key.shard]) * 100)) for key in [*PAGES, CHECKPOINT]]
        assert await store.put(objects) == [Put.STORED] * 4
        await store.close()

    asyncio.run(fill())
    return url


@pytest.fixture
def run(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(action: str, *arguments: str) -> tuple[int, str, str]:
        options = ["--store", url, "--store-secret-file", str(tmp_path / "secret")]
        status = cli.main(["store", action, *arguments, *options])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_ls_lists_objects_and_stat_counts_them(run: Run) -> None:
    status, out, _ = run("ls", "--json")
    assert status == 0
    listed = {row.pop("key"): row for row in json.loads(out)}
    assert all(row.pop("used_s") < 3600 for row in listed.values())
    num_bytes = 100 + SEAL_BYTES
    pages = {str(key): {"kind": "page", "shard": key.shard, "bytes": num_bytes} for key in PAGES}
    assert listed == pages | {str(CHECKPOINT): {"kind": "checkpoint", "shard": 0, "bytes": num_bytes}}
    assert [line.split()[1] for line in run("ls")[1].splitlines()[1:]].count("page") == 3
    state = json.loads(run("stat", "--json")[1])
    assert (state["pages"], state["checkpoints"], state["is_reachable"]) == (3, 1, True)
    assert (state["bytes"], state["capacity_bytes"]) == (4 * num_bytes, 1 << 20)
    assert "656 B of 1.00 MiB" in run("stat")[1]


def test_get_verifies_seal_and_removes_corrupt_object(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "body"
    status, out, _ = run("get", str(PAGES[2]), "-o", str(file))
    assert (status, out) == (0, f"hit: 100 bytes in {file}\n")
    assert file.read_bytes() == bytes([2]) * 100
    file.unlink()
    (tmp_path / "secret").write_bytes(bytes(32))
    assert run("get", str(PAGES[2]), "-o", str(file))[:2] == (1, "corrupt\n")
    assert run("get", str(PAGES[2]), "-o", str(file))[:2] == (1, "miss\n")
    assert not file.exists()
    (tmp_path / "secret").write_bytes(SECRET)
    status, out, err = run("get", str(PAGES[1]), "-o", str(tmp_path / "no" / "folder"))
    assert (status, out) == (2, "")
    assert "--output" in err


def test_rm_removes_objects_and_warns_of_a_readable_secret_file(run: Run, tmp_path: Path) -> None:
    keys = [str(PAGES[0]), str(CHECKPOINT)]
    assert run("rm", *keys) == (0, "2 of 2 removed\n", "")
    (tmp_path / "secret").chmod(0o644)
    status, out, err = run("rm", *keys, str(PAGES[1]))
    assert (status, out) == (1, "1 of 3 removed\n")
    assert f"chmod 600 {tmp_path / 'secret'}" in err
    assert [row["key"] for row in json.loads(run("ls", "--json")[1])] == [str(PAGES[2])]


def test_bench_removes_its_objects(run: Run) -> None:
    before = json.loads(run("stat", "--json")[1])["bytes"]
    status, out, _ = run("bench", "--sizes", "1KiB,4KiB", "--batches", "1,8", "--bytes", "64KiB", "--json")
    assert status == 0
    rows = json.loads(out)
    assert [(row["operation"], row["object_bytes"], row["batch"], row["calls"]) for row in rows[::3]] == [
        ("put", 1024, 1, 20),
        ("put", 1024, 8, 8),
        ("put", 4096, 1, 16),
        ("put", 4096, 8, 2),
    ]
    assert [row["outcomes"] for row in rows[3:6]] == [{"stored": 64}, {"there": 64}, {"hit": 64}]
    assert json.loads(run("stat", "--json")[1])["bytes"] == before
    assert "hit" in run("bench", "--sizes", "1KiB", "--batches", "1", "--bytes", "4KiB")[1]


async def test_measurements_count_outcomes_of_full_store() -> None:
    ticks = count()
    store = MemoryStore(3000)
    bench = Bench(sizes=(1000,), batches=(4,), bytes_max=4000)
    measurements = await measure(store, bench, Random(1), lambda: float(next(ticks)))
    assert measurements_table(measurements).row_count == 3
    assert [row.mean_s for row in measurements] == [1.0] * 3
    await store.close()
    put, contains, got = (row.outcomes for row in measurements)
    assert put["full"] == 1
    assert contains["absent"] == got["miss"] == 4 - put["stored"]


async def test_state_has_problem_of_store_that_cannot_list() -> None:
    class Unlisted(MemoryStore):
        async def list_objects(self) -> list[StoredObject]:
            raise StoreError("listing is unavailable")

    state = await read_state(Unlisted(1000), lambda: 0.0)
    assert state.is_reachable
    assert state.problem == "listing is unavailable"
    assert state.capacity_bytes == 1000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("get", "abc", "-o", "/dev/null"), "abc"),
        (("rm", "zz.0.p"), "zz.0.p"),
        (("bench", "--sizes", "much"), "--sizes"),
        (("bench", "--sizes", "0"), "--sizes"),
        (("bench", "--batches", "1,none"), "--batches"),
        (("bench", "--batches", "0"), "--batches"),
        (("bench", "--bytes", "-"), "--bytes"),
    ],
)
def test_store_command_refuses_mistakes_in_one_line(run: Run, arguments: tuple[str, ...], named: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert named in err
