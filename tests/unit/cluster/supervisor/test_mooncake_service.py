"""The processes of a store: ready, started again, ended with their server; and the real ones of Mooncake."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import psutil
import pytest

from tidemill.cluster.supervisor import mooncake_service as store_service
from tidemill.cluster.supervisor.mooncake_service import MooncakeProcess, SupervisedProcess, running_store
from tidemill.kvstore.errors import StoreError

ROOT = Path(__file__).parents[4]

PROGRAM = """
import os, socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.send(b"%d\\n" % os.getpid())
print("ready", flush=True)
peer.recv(1)
"""
"""Says its pid to whoever listens at a port, and lives until that one hangs up."""

WAITS = "import signal; signal.pause()"

SERVER = f"""
import sys
from tidemill.cluster.supervisor.mooncake_service import SupervisedProcess, MooncakeProcess
kept = SupervisedProcess(MooncakeProcess(name="program", arguments=("-c", {PROGRAM!r}, sys.argv[1])))
kept.start()
kept.wait_until_ready()
input()
"""


class Lives:
    """The lives of the program, as they come."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = str(listener.getsockname()[1])
        self.peer = socket.socket()

    def next_pid(self) -> int:
        self.peer.close()
        self.peer, _ = self._listener.accept()
        return int(self.peer.makefile().readline())

    def has_ended(self) -> bool:
        """Waits for the end of the present life."""
        with suppress(ConnectionResetError):
            return self.peer.recv(1) == b""
        return True


@pytest.fixture
def lives() -> Iterator[Lives]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        lives = Lives(listener)
        yield lives
        lives.peer.close()


def test_a_program_that_dies_is_started_again_and_stops_for_good(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    kept = SupervisedProcess(MooncakeProcess(name="program", arguments=("-c", PROGRAM, lives.port)))
    kept.start()
    kept.wait_until_ready()
    pids = [lives.next_pid()]
    for _ in range(2):
        os.kill(pids[-1], signal.SIGKILL)
        pids.append(lives.next_pid())
    kept.stop()
    assert lives.has_ended()
    assert len(set(pids)) == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert [record.message for record in caplog.records] == [
        "the program ended (SIGKILL): it is started again"
    ] * 2
    kept.stop()


def test_a_program_that_never_becomes_ready_is_an_error_that_says_how_it_ended() -> None:
    kept = SupervisedProcess(MooncakeProcess(name="program", arguments=("-c", "raise SystemExit(3)")))
    kept.start()
    try:
        with pytest.raises(StoreError, match=r"the program ended \(status 3\) while it started"):
            kept.wait_until_ready()
    finally:
        kept.stop()


def test_a_program_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_service, "START_S_MAX", 0.05)
    kept = SupervisedProcess(MooncakeProcess(name="program", arguments=("-c", WAITS)))
    kept.start()
    try:
        with pytest.raises(StoreError, match="does not answer"):
            kept.wait_until_ready()
    finally:
        kept.stop()


def test_a_program_with_a_port_is_ready_when_that_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        kept = SupervisedProcess(
            MooncakeProcess(
                name="program", arguments=("-c", WAITS), port="{}:{}".format(*listener.getsockname())
            )
        )
        kept.start()
        try:
            with monkeypatch.context() as patched:
                patched.setattr(store_service, "START_S_MAX", 0.05)
                with pytest.raises(StoreError, match="does not answer"):
                    kept.wait_until_ready()
            listener.listen()
            kept.wait_until_ready()
        finally:
            kept.stop()


def test_it_dies_with_a_server_that_is_killed(lives: Lives) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, lives.port],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src"},
    ) as server:
        lives.next_pid()
        server.kill()
        assert lives.has_ended()


def test_nothing_is_started_for_a_leash_without_its_server(lives: Lives) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tidemill.cluster.supervisor.die_with_parent", "1", "-c", PROGRAM, lives.port],
        check=False,
        capture_output=True,
    )
    assert ended.stdout == b""
    assert ended.returncode == 0


def test_another_store_is_left_alone() -> None:
    with running_store("file:///a?size=1GiB") as url:
        assert url == "file:///a?size=1GiB"


def test_a_master_that_is_not_there_is_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with (
            pytest.raises(StoreError, match="no Mooncake master answers"),
            running_store(f"mooncake://127.0.0.1:{unused.getsockname()[1]}?size=64MiB"),
        ):
            pass


def test_memory_is_lent_to_a_master_of_our_own_and_to_one_that_is_joined() -> None:
    """The real thing; all of it has ended afterwards."""
    before = set(psutil.Process().children())
    with running_store("mooncake?size=64MiB&ports=open") as own:
        address = urlsplit(own).netloc
        with running_store(f"mooncake://{address}?size=32MiB&write=hits&ports=open") as joined:
            assert joined == f"mooncake://{address}?write=hits&ports=open"
            assert capacity_bytes(own) == 96 << 20
            started = set(psutil.Process().children()) - before
            assert len(started) == 3
    assert set(psutil.Process().children()) == before
    assert not [process for process in started if process.is_running()]


def capacity_bytes(url: str) -> int:
    [admin] = parse_qs(urlsplit(url).query)["admin"]
    [line] = [
        line
        for line in httpx.get(f"http://{admin}/metrics").text.splitlines()
        if line.startswith("master_total_capacity_bytes ")
    ]
    return int(line.split()[1])
