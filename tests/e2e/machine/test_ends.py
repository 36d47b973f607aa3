"""A server ends with its own Ray, and a killed server leaves nothing: no process, file or shared memory."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.e2e.faults import GCS, RAYLET, REAPER, Run, process_of, run
from tests.support.e2e.history import Ask, asks
from tests.support.e2e.server import Server, command_of, eventually, run_cli, runs

pytestmark = pytest.mark.slow

OPTIONS = ("keeper", "--port", "0", "--prefill", "1", "--decode", "1", "--memory", "64MiB")
SHM = Path("/dev/shm")  # noqa: S108 - where a server without --store has its store
EXIT_LOST = 75
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(OPTIONS, tmp_path / "log")
    try:
        yield server
    finally:
        server.kill_everything()


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


@pytest.mark.parametrize(("name", "named"), [(GCS, "GCS"), (RAYLET, "raylet")])
def test_server_ends_with_its_ray(
    server: Server, asked: list[Ask], name: str, named: str, tmp_path: Path
) -> None:
    """Streams end complete or with an event that names the cause; nothing is left."""
    before = server.processes()
    found = run_while(server, asked, process_of(server, name))
    assert server.wait(before) == EXIT_LOST
    line = f"Ray's {named} has ended, and with it this server: start it again"
    assert f"tidemill: {line}" in (tmp_path / "log").read_text()
    cut = [call for call in found.calls if call.trouble]
    assert cut, "too late: make the streams longer"
    for call in cut:
        assert len(call.trouble) == 2
        assert line in call.trouble[0], call.trouble
        assert call.trouble[1] == "the stream was cut"  # without [DONE]


def test_server_ends_soon_when_each_process_is_terminated(server: Server, tmp_path: Path) -> None:
    """A service manager sends SIGTERM to a whole control group. No call of Ray waits for a minute then."""
    before = server.processes()
    for process in before:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    status = server.wait(before)
    log = (tmp_path / "log").read_text()
    assert status in {0, EXIT_LOST}, log
    assert "GCS may have been killed" not in log


def test_killed_server_leaves_nothing(server: Server, asked: list[Ask]) -> None:
    """Its reaper ends Ray's agents and removes the folders; the reaper itself ends last."""
    before, folders = server.processes(), server.folders()
    assert [folder.parent == SHM for folder in folders] == [True, False]
    found = run_while(server, asked, psutil.Process(server.pid))
    assert server.wait(before) == -signal.SIGKILL
    assert not [folder for folder in folders if folder.exists()]
    assert [call.trouble for call in found.calls if call.trouble]


def test_cleanup_removes_what_is_left_and_touches_no_running_server(server: Server, tmp_path: Path) -> None:
    """Ray's agents, the folder and the shared memory are left if the reaper is killed as well."""
    other = Server(OPTIONS, tmp_path / "other")
    try:
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
        assert len(other.workers()) == 2
        assert other.stop(signal.SIGHUP) == 0  # as when a terminal is closed
    finally:
        other.kill_everything()


def running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return list(filter(runs, processes))
