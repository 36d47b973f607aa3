"""A server ends with its own Ray, and a killed server leaves nothing: no process, file or shared memory."""

import asyncio
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.e2e.faults import EDGE, GCS, REAPER, Run, process_of, processes_of, run
from tests.support.e2e.history import Ask, asks
from tests.support.e2e.server import Server, command_of, eventually, run_cli, runs

pytestmark = pytest.mark.slow

OPTIONS = ("keeper", "--port", "0", "--mixed", "1", "--memory", "64MiB")
SHM = Path("/dev/shm")  # noqa: S108 - where a server without --store has its store
EXIT_LOST = 75
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another server, beside which those of all tests end. At last each of its processes gets SIGTERM: a
    service manager sends it to a whole control group. No call of Ray waits for a minute then."""
    with Server(OPTIONS, tmp_path_factory.mktemp("other") / "log") as other:
        yield other
        before = other.processes()
        for process in before:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        assert other.wait(before) in {0, EXIT_LOST}, other.log()
        assert "GCS may have been killed" not in other.log()


@pytest.fixture
def server(other: Server, tmp_path: Path) -> Iterator[Server]:
    with Server(OPTIONS, tmp_path / "log") as server:
        yield server
    assert len(other.workers()) == 1


@pytest.fixture
def asked() -> list[Ask]:
    """Streams of thousands of tokens."""
    return [ask for ask in asks(Random(1), 12, num_tokens=40, max_tokens=7000) if "n" not in ask.body]


def run_while(server: Server, asked: list[Ask], victim: psutil.Process) -> Run:
    """Kill -9 `victim` while all of `asked` stream; return what the clients saw."""

    async def main() -> Run:
        running = asyncio.create_task(run(server, asked, "salt"))
        await asyncio.sleep(2.0)
        victim.kill()
        return await running

    return asyncio.run(main())


def test_server_ends_with_its_ray(server: Server, asked: list[Ask]) -> None:
    """Streams end complete or with an event that names the cause; nothing is left. The raylet of a detached
    server ends in tests/e2e/lifecycle/test_detached.py."""
    before = server.processes()
    found = run_while(server, asked, process_of(server, GCS))
    assert server.wait(before) == EXIT_LOST
    line = "Ray's GCS has ended, and with it this server: start it again"
    assert f"tidemill: {line}" in server.log()
    cut = [call for call in found.calls if call.trouble]
    assert cut, "too late: make the streams longer"
    for call in cut:
        assert len(call.trouble) == 2
        assert line in call.trouble[0], call.trouble
        assert call.trouble[1] == "the stream was cut"  # without [DONE]


def test_server_ends_when_the_sockets_of_its_ray_are_removed(server: Server) -> None:
    """A program that removes old files does so: no worker that ends could start again."""
    before = server.processes()
    [sockets] = server.temp_folder.glob("tidemill-*/**/session_2*/sockets")
    shutil.rmtree(sockets)
    assert server.wait(before) == EXIT_LOST
    assert "was removed, and no worker starts without it: start the server again" in server.log()


def test_killed_server_leaves_nothing(asked: list[Ask], tmp_path: Path) -> None:
    """Its edges end. Its reaper ends Ray's agents, removes the folders, and ends last."""
    with Server((*OPTIONS, "--frontends", "2"), tmp_path / "log") as server:
        before, folders = server.processes(), server.folders()
        assert [folder.parent == SHM for folder in folders] == [True, False]
        assert len(processes_of(server, EDGE, 2)) == 2
        found = run_while(server, asked, psutil.Process(server.pid))
        assert server.wait(before) == -signal.SIGKILL
    assert not [folder for folder in folders if folder.exists()]
    assert [call.trouble for call in found.calls if call.trouble]


def test_cleanup_removes_what_is_left_and_touches_no_running_server(server: Server) -> None:
    """Ray's agents, the folder and the shared memory are left if the reaper is killed as well."""
    before, folders = server.processes(), server.folders()
    process_of(server, REAPER).kill()
    psutil.Process(server.pid).kill()
    eventually(lambda: len(running(before)) == len(AGENTS))
    left = running(before)
    assert sorted(command_of(process).strip() for process in left) == sorted(AGENTS)
    # A server that another test starts may remove what is in /dev/shm first.
    (own,) = (folder for folder in folders if folder.is_relative_to(server.temp_folder))
    expected = [f"{own} ", *(f"process {process.pid}" for process in left)]
    seen = {path.name: path.parent for path in folders}
    for options, verb in ((("--dry-run",), "would remove "), ((), "removed ")):
        assert own.exists()
        assert len(running(left)) == len(left)
        ended, _ = run_cli("cleanup", *options, TMPDIR=str(server.temp_folder))
        assert ended.returncode == 0, ended.stderr
        lines = [line for line in ended.stdout.splitlines() if any(name in line for name in seen)]
        assert 1 <= len(lines) <= len(folders)
        assert all(line.startswith(verb) for line in lines)
        assert all(any(part in line for line in lines) for part in expected), lines
    assert not [folder for folder in folders if folder.exists()]
    assert not running(left)
    assert server.wait(before) == -signal.SIGKILL


def running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return list(filter(runs, processes))
