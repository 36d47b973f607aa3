"""A stopped frontend, exhausted file descriptors, a worker without memory, two servers on one machine:
streams stay exact, and the server goes on."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest

from tests.support.e2e.faults import process_of
from tests.support.e2e.history import Ask, Call, asks
from tests.support.e2e.machine import WORKERS, check_during, file_limit, no_more_memory
from tests.support.e2e.server import NO_TLS, Server, eventually, run_cli

pytestmark = pytest.mark.slow

SIZES = ("--prefill", "1", "--decode", "1", "--memory", "64MiB")
STOPPED_S = 5.0

check = partial(check_during, then_quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    """The options of a server without its port."""
    return ("keeper", *SIZES, "--store", f"file://{folder / 'store'}?size=64MiB")


@pytest.fixture(scope="module")
def server(folder: Path, options: Sequence[str]) -> Iterator[Server]:
    with Server([*options, "--port", "0"], folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def asked() -> list[Ask]:
    return asks(Random(3), 8, num_tokens=300, max_tokens=240)


def test_stopped_frontend_goes_on_with_its_streams(
    server: Server, asked: list[Ask], calm: list[Call]
) -> None:
    """SIGSTOP, for longer than the time after which a silent worker is out."""
    frontend = psutil.Process(server.pid)
    before = server.lives()

    def stop() -> None:
        frontend.suspend()
        time.sleep(STOPPED_S)
        frontend.resume()

    calls = check(server, asked, calm, "stopped", stop)
    assert max(call.ended_s - call.sent_s for call in calls) > STOPPED_S, "too late: make the streams longer"
    assert server.lives() == before


FIRST_DESCRIPTORS = 8
"""Descriptors that a server never closes."""


def test_frontend_without_file_descriptors_keeps_its_streams(
    server: Server, asked: list[Ask], calm: list[Call]
) -> None:
    """New connections are closed or wait; as soon as there are descriptors again, requests are served."""
    frontend = psutil.Process(server.pid)
    limits: list[int] = []

    def exhaust() -> None:
        limits.append(file_limit(frontend, FIRST_DESCRIPTORS))  # what others free is beyond it
        for _ in range(8):
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{server.url}/ping", timeout=0.5, verify=NO_TLS)

    try:
        check_during(server, asked, calm, "exhausted", exhaust)
    finally:
        file_limit(frontend, limits[0])
    eventually(lambda: is_up(server))
    check(server, asked, calm, "descriptors")


def is_up(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/ping", timeout=5, verify=NO_TLS).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_worker_without_file_descriptors_computes(
    server: Server, asked: list[Ask], calm: list[Call], name: str
) -> None:
    """It cannot open files of the store, so it computes what it would have fetched."""
    worker = process_of(server, name)
    before = file_limit(worker, worker.num_fds())
    try:
        check(server, asked, calm, f"without-{name}")
    finally:
        file_limit(worker, before)
    check(server, asked, calm, f"with-{name}")
    assert process_of(server, name).pid == worker.pid


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_streams_survive_a_worker_that_the_kernel_kills_for_memory(
    server: Server, asked: list[Ask], calm: list[Call], name: str
) -> None:
    """A real kill: the worker's control group may not have another page."""
    worker, tries = process_of(server, name), count()

    def is_killed() -> bool:
        check(server, asked, calm, f"memory-{name}-{next(tries)}")
        return not worker.is_running()

    with no_more_memory(worker):
        eventually(is_killed)
    assert process_of(server, name).pid != worker.pid


def test_second_server_on_the_same_port_is_refused_in_one_line(
    server: Server, options: Sequence[str]
) -> None:
    port = server.url.rpartition(":")[2]
    ended, left = run_cli("serve", *options, "--port", port)
    assert (ended.returncode, left) == (2, [])
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"tidemill: cannot listen on 127.0.0.1:{port}")
    assert line.endswith("give another --host or --port, 0 for a free port")


def test_two_servers_share_a_machine_and_a_store(
    server: Server, options: Sequence[str], asked: list[Ask], calm: list[Call], tmp_path: Path
) -> None:
    """Both answer exactly, each finds the pages of the other, and kill -9 of one leaves the other alone."""
    check(server, asked, calm, "shared")
    with Server([*options, "--port", "0"], tmp_path / "log") as other:
        hits = other.counter("store_gets_as_hit")
        check(other, asked, calm, "shared")
        eventually(lambda: other.counter("store_gets_as_hit") > hits)
        before = other.processes()
        check(server, asked, calm, "beside", psutil.Process(other.pid).kill)
        assert other.wait(before) < 0
    check(server, asked, calm, "after")
