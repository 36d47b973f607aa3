"""Stores of `serve --store` are planned, and their processes start, restart and end with their server."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from tidemill.cluster.observability.telemetry import QUIET
from tidemill.cluster.processes import mooncake_service
from tidemill.cluster.processes.mooncake_service import StoreActor, planned_store
from tidemill.cluster.processes.store_plan import StorePlan, check_shared, other_tiers, plan_store
from tidemill.cluster.settings import StoreProgram
from tidemill.kvstore.errors import StoreError

ROOT = Path(__file__).parents[4]

PROGRAM = """
import os, socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.send(b"%d\\n" % os.getpid())
print("ready", flush=True)
peer.recv(1)
"""
"""Sends its pid to a port, and runs until the peer closes the connection."""

SLEEPS = "import signal; signal.pause()"

SERVER = f"""
import sys
from tidemill.cluster.settings import StoreProgram
from tidemill.cluster.processes.mooncake_service import SupervisedProcess
process = SupervisedProcess(StoreProgram(name="program", arguments=("-c", {PROGRAM!r}, sys.argv[1])))
process.start()
process.wait_until_ready()
input()
"""


class Incarnations:
    """The incarnations of the program over its restarts, in order."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = str(listener.getsockname()[1])
        self.peer = socket.socket()

    def next_pid(self) -> int:
        self.peer.close()
        self.peer, _ = self._listener.accept()
        return int(self.peer.makefile().readline())

    def has_ended(self) -> bool:
        """Wait for the end of the current incarnation."""
        with suppress(ConnectionResetError):
            return self.peer.recv(1) == b""
        return True


@pytest.fixture
def incarnations() -> Iterator[Incarnations]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        incarnations = Incarnations(listener)
        yield incarnations
        incarnations.peer.close()


@contextmanager
def started(*arguments: str, port: str = "") -> Generator[StoreActor]:
    program = StoreProgram(name="program", arguments=("-c", *arguments), port=port)
    store = StoreActor((program,), QUIET)
    try:
        yield store
    finally:
        store.stop()


def test_process_restarts_after_crash_until_it_is_stopped(
    incarnations: Incarnations, caplog: pytest.LogCaptureFixture
) -> None:
    with started(PROGRAM, incarnations.port) as process:
        logging.getLogger().addHandler(caplog.handler)  # behind the log of the process
        process.wait_until_ready()
        pids = [incarnations.next_pid()]
        for _ in range(2):
            os.kill(pids[-1], signal.SIGKILL)
            pids.append(incarnations.next_pid())
        assert os.getsid(pids[-1]) == os.getsid(0)
        assert os.getpgid(pids[-1]) != os.getpgid(0)
        process.stop()
        assert incarnations.has_ended()
    assert len(set(pids)) == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert [record.message for record in caplog.records] == [
        "the program ended (SIGKILL) and will be restarted"
    ] * 2


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit(3)", r"the program ended \(status 3\) while it started"),
        (SLEEPS, "does not answer"),
    ],
)
def test_process_that_ends_or_is_not_ready_in_time_raises(
    program: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == SLEEPS:
        monkeypatch.setattr(mooncake_service, "START_S_MAX", 0.05)
    with started(program) as process, pytest.raises(StoreError, match=error):
        process.wait_until_ready()


def test_process_with_port_is_ready_when_it_accepts_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with started(SLEEPS, port="{}:{}".format(*listener.getsockname())) as process:
            with monkeypatch.context() as patched:
                patched.setattr(mooncake_service, "START_S_MAX", 0.05)
                with pytest.raises(StoreError, match="does not answer"):
                    process.wait_until_ready()
            listener.listen()
            process.wait_until_ready()


def test_process_may_end_twice_before_it_is_ready(tmp_path: Path) -> None:
    ends = f"""
import signal
from pathlib import Path
starts = Path({str(tmp_path / "starts")!r})
starts.write_text(starts.read_text() + "." if starts.exists() else ".")
if len(starts.read_text()) < 3:
    raise SystemExit(3)
print("ready", flush=True)
signal.pause()
"""
    with started(ends) as process:
        process.wait_until_ready()


def test_process_ends_with_killed_server(incarnations: Incarnations) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, incarnations.port],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src"},
    ) as server:
        incarnations.next_pid()
        server.kill()
        assert incarnations.has_ended()


def test_die_with_parent_starts_nothing_without_its_parent(incarnations: Incarnations) -> None:
    module = "tidemill.cluster.processes.system.die_with_parent"
    words = [sys.executable, "-m", module, "1", "-c", PROGRAM, incarnations.port]
    ended = subprocess.run(words, check=False, capture_output=True)
    assert (ended.stdout, ended.returncode) == (b"", 0)


def test_joined_master_that_is_away_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"mooncake://127.0.0.1:{unused.getsockname()[1]}?size=64MiB"
        with pytest.raises(StoreError, match="no Mooncake master answers"):
            planned_store(url, None)


def test_detached_server_plans_once(tmp_path: Path) -> None:
    """Its next endpoint finds the ports taken, by the programs that run."""
    planned = planned_store("mooncake?size=64MiB&ports=open", tmp_path)
    master, _ = planned[1]
    host, _, port = master.port.partition(":")
    with socket.create_server((host, int(port))):
        assert planned_store("mooncake?size=64MiB&ports=open", tmp_path) == planned


GIB = 1 << 30


def test_plan_starts_nothing_for_other_stores_and_keeps_their_order() -> None:
    for url in ("file:///a?size=1GiB", "/mooncake", "file:///mooncake?size=1GiB,file:///b"):
        assert plan_store(url) == StorePlan(url=url)
        assert other_tiers(url) == url
    url = "file:///near?size=1GiB,mooncake://h:1?size=1GiB&host=127.0.0.1,file:///far?write=none"
    assert plan_store(url).url == "file:///near?size=1GiB,mooncake://h:1,file:///far?write=none"
    assert other_tiers(url) == "file:///near?size=1GiB,file:///far?write=none"
    for shared in ("memory-of-pages/folder", "memory:?size=1MiB,file:///a"):
        check_shared(shared)
    with pytest.raises(StoreError, match="inside one process"):
        check_shared("memory:?size=1MiB,memory")


def test_plan_starts_master_and_memory_owner() -> None:
    for url in ("mooncake?size=1GiB", "mooncake:?size=1GiB", "mooncake://?size=1GiB"):
        plan = plan_store(url)
        master, owner = plan.programs
        assert {"--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"} <= {*master.arguments}
        [admin] = parse_qs(urlsplit(plan.url).query)["admin"]
        assert plan.url == f"mooncake://{master.port}?admin={admin}"
        assert admin != master.port
        assert owner.arguments[2:] == (master.port, str(GIB), "--host=127.0.0.1")


def test_plan_joins_running_master_and_may_lend_memory_to_it() -> None:
    plan = plan_store("mooncake://store.example:50051?write=hits")
    assert (plan.url, plan.joined) == ("mooncake://store.example:50051?write=hits", "store.example:50051")
    assert plan.programs == ()
    plan = plan_store("mooncake://127.0.0.1:50051?protocol=rdma&device=mlx5_0&size=1GiB&timeout=1")
    assert plan.url == "mooncake://127.0.0.1:50051?protocol=rdma&device=mlx5_0&timeout=1"
    [owner] = plan.programs
    lent = ("127.0.0.1:50051", str(GIB), "--protocol=rdma", "--device=mlx5_0")
    assert owner.arguments[2:] == lent


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("mooncake?size=much", "512MiB"),
        ("mooncake?size=0", "memory"),
        ("mooncake?size=1000000GiB", "memory"),
        ("mooncake?size=1g&size=2g", "once"),
        ("mooncake?port=none", "port none"),
        ("mooncake?port=65536", "port 65536"),
        ("mooncake?host=0.0.0.0", "host 0.0.0.0"),
        ("mooncake?host=no-such-interface", "no-such-interface"),
        ("mooncake?host=192.0.2.1", "host="),
        ("mooncake://host", "mooncake://host:port"),
        ("mooncake://host:port", "mooncake://host:port"),
        ("mooncake://host:1?port=2", "port"),
        ("mooncake,mooncake://h:1", "one tier"),
        ("mooncake:10.0.0.5:50051", "mooncake://host:port"),
        ("mooncake://10.0.0.5:50051?host=lo", "size="),
    ],
)
def test_plan_refuses_mistakes_in_one_line(url: str, named: str) -> None:
    with pytest.raises(StoreError) as refused:
        plan_store(url)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_plan_takes_port_and_interface_and_refuses_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(StoreError, match="port="):
            plan_store(f"mooncake?port={port}")
    plan = plan_store(f"mooncake?host=lo&port={port}")
    assert urlsplit(plan.url).netloc == f"127.0.0.1:{port}"
    assert plan.programs[1].arguments[3] == str(min(8 * GIB, psutil.virtual_memory().total // 4))
