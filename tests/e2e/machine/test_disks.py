"""Full and read-only file systems under the page store while a server streams: no answer changes."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tests.support.e2e.history import Ask, Call, asks
from tests.support.e2e.machine import IN_OWN_SHM, check_during, fill, free_bytes, mounted, remount
from tests.support.e2e.server import Server, eventually

pytestmark = pytest.mark.slow

OPTIONS = ("keeper", "--port", "0", "--prefill", "1", "--decode", "1", "--memory", "64MiB")
SHM_SIZE = "128m"
"""Ray itself reserves 80 MiB of /dev/shm."""

check = partial(check_during, width=4, then_quiet=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(tmp_path_factory.mktemp("disks") / "disk", "8m") as folder:
        yield folder


@pytest.fixture(scope="module", params=["disk", "shm"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with its store on a small disk, and one without --store in a small /dev/shm."""
    disk = request.getfixturevalue("disk")  # skips where mounting is not allowed
    store = ("--store", f"file://{disk}/store?size=1GiB") if request.param == "disk" else ()
    prefix = () if store else (*IN_OWN_SHM, SHM_SIZE)
    with Server([*OPTIONS, *store], tmp_path_factory.mktemp("log") / "log", prefix=prefix) as server:
        yield server


@pytest.fixture
def store_folder(server: Server, request: pytest.FixtureRequest) -> Path:
    """A folder of the file system of the store, as this process sees it."""
    is_disk = "disk" in request.node.callspec.params["server"]
    return request.getfixturevalue("disk") if is_disk else Path(f"/proc/{server.pid}/root/dev/shm")


@pytest.fixture(scope="module")
def asked() -> list[Ask]:
    return asks(Random(2), 12, num_tokens=300, max_tokens=120)


def test_full_disk_under_the_store_changes_no_answer(
    server: Server, store_folder: Path, asked: list[Ask], calm: list[Call]
) -> None:
    refused = server.counter("store_puts_as_full")
    check(server, asked, calm, "full", lambda: fill(store_folder))
    assert free_bytes(store_folder) < 1 << 20
    check(server, asked, calm, "still-full", lambda: fill(store_folder))
    eventually(lambda: server.counter("store_puts_as_full") > refused)
    (store_folder / "filler").unlink()
    stored = server.counter("store_puts_as_stored")
    check(server, asked, calm, "space")
    eventually(lambda: server.counter("store_puts_as_stored") > stored)


def test_read_only_disk_under_the_store_changes_no_answer(
    server: Server, store_folder: Path, asked: list[Ask], calm: list[Call]
) -> None:
    """The small disk alone, because /dev/shm of another process cannot be remounted from here."""
    if "root" in store_folder.parts:
        pytest.skip("the disk alone")
    check(server, asked, calm, "ro", lambda: remount(store_folder, "ro"))
    check(server, asked, calm, "still-ro")
    remount(store_folder, "rw")
    stored, tries = server.counter("store_puts_as_stored"), count()

    def is_used() -> bool:
        check(server, asked[:2], calm[:2], f"rw-{next(tries)}")
        return server.counter("store_puts_as_stored") > stored

    eventually(is_used)
