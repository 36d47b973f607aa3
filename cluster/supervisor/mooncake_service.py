"""The Mooncake that a server brings along: its master and this host's owner of memory.

They are children of the process that serves. They must answer before the first worker opens the store, so
before there is a Ray to place them, and nothing that Ray knows would help them. Each has a thread that starts
it again when it dies, on the same port, so that its clients come back by themselves; it ends with the server,
also when that is killed: see leash.py. A process that is frozen is not noticed here, but by each user of the
store: see guard.py.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from threading import Event, Lock, Thread

from tidemill.cluster.supervisor.store_plan import Master, MemoryOwner, StorePlan, plan_store
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.mooncake_store import check_library, is_listening
from tidemill.kvstore.stores.open_store import check_url

START_S_MAX = 30.0
STOP_S_MAX = 3.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
"""Before a process that died is started again: doubled each time, and short again once it was ready."""

LOOK_S = 0.02

MASTER_OPTIONS = ("--enable_metric_reporting=false", "--logtostderr", "--minloglevel=2")

log = logging.getLogger(__name__)


@contextlib.contextmanager
def running_store(url: str) -> Generator[str]:
    """The URL for workers of the store that `url` asks `serve` for; what it needs runs meanwhile.

    Raises StoreError with one line that names the fix; nothing is left running then.
    """
    plan = plan_store(url)
    check_url(plan.url)
    if not plan.has_mooncake:
        yield plan.url
        return
    check_library()
    if plan.master is None and not is_listening(plan.joined):
        raise StoreError(
            f"no Mooncake master answers at {plan.joined}: check its address, "
            "or leave it to --store mooncake?size=8GiB to start one"
        )
    with contextlib.ExitStack() as stack:
        for part in _parts(plan):
            kept = SupervisedProcess(part)
            stack.callback(kept.stop)
            kept.start()
            kept.wait_until_ready()
        yield plan.url


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeProcess:
    """A Python program to keep alive. It is ready when it takes connections at `port`, HOST:PORT, or, without
    one, when it has written a line."""

    name: str
    arguments: tuple[str, ...]
    port: str = ""


class SupervisedProcess:
    """A program that is started again whenever it ends, until it is stopped."""

    def __init__(self, part: MooncakeProcess) -> None:
        self._part = part
        self._first = Future[None]()  # of its lives: ready, or ended before that
        self._stopped = Event()
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = Thread(target=self._run, name=part.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Raises StoreError when it ends first, or takes too long."""
        try:
            self._first.result(START_S_MAX)
        except TimeoutError:
            raise StoreError(
                f"the {self._part.name} does not answer {START_S_MAX:.0f} s after its start: "
                "use file:///path meanwhile"
            ) from None

    def stop(self) -> None:
        """Ends it for good, and waits for that. An owner tells its master, if it gets the time to."""
        with self._lock:
            self._stopped.set()
            if self._process is not None:
                self._process.terminate()
        self._thread.join(STOP_S_MAX)
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        """One thread for all lives: Linux ends a leashed process with the thread that started it."""
        pause_s = PAUSE_S_MIN
        while (process := self._start()) is not None:
            with process:
                if self._becomes_ready(process):
                    pause_s = PAUSE_S_MIN
                    self._first_life(None)
                for _ in process.stdout or ():  # until its end
                    pass
            ended = f"the {self._part.name} ended ({_status(process.returncode)})"
            self._first_life(StoreError(f"{ended} while it started: use file:///path meanwhile"))
            if not self._stopped.is_set():
                log.warning("%s: it is started again", ended)
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _start(self) -> "subprocess.Popen[str] | None":
        command = [
            sys.executable,
            "-m",
            "tidemill.cluster.supervisor.die_with_parent",
            str(os.getpid()),
            *self._part.arguments,
        ]
        with self._lock:
            if self._stopped.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the server, which ends it last
            )
            return self._process

    def _becomes_ready(self, process: "subprocess.Popen[str]") -> bool:
        assert process.stdout is not None
        if not self._part.port:
            return process.stdout.readline() != ""
        while process.poll() is None:
            if is_listening(self._part.port):
                return True
            self._stopped.wait(LOOK_S)
        return False

    def _first_life(self, error: StoreError | None) -> None:
        with contextlib.suppress(InvalidStateError):  # that of an earlier life stays
            if error is None:
                self._first.set_result(None)
            else:
                self._first.set_exception(error)


def _parts(plan: StorePlan) -> Sequence[MooncakeProcess]:
    found = [master_process(plan.master)] if plan.master is not None else []
    return found + ([owner_process(plan.owner)] if plan.owner is not None else [])


def master_process(master: Master) -> MooncakeProcess:
    """Its defaults listen on every interface: each socket is told where to be."""
    arguments = (
        f"--rpc_address={master.host}",
        f"--rpc_port={master.port}",
        f"--metrics_host={master.host}",
        f"--metrics_port={master.admin_port}",
        f"--http_metadata_server_host={master.host}",
        *MASTER_OPTIONS,
    )
    return MooncakeProcess(
        name="Mooncake master",
        arguments=("-m", "mooncake.cli", *arguments),
        port=f"{master.host}:{master.port}",
    )


def owner_process(owner: MemoryOwner) -> MooncakeProcess:
    options = (f"--{name}={value}" for name, value in (("host", owner.host), *owner.transport) if value)
    arguments = (owner.master, str(owner.num_bytes), *options)
    return MooncakeProcess(
        name="owner of Mooncake's memory",
        arguments=("-m", "tidemill.kvstore.stores.mooncake_memory_owner", *arguments),
    )


def _status(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
