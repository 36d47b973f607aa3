"""The Mooncake processes that a cluster runs: a master and a process that lends it memory of this
host.

They are children of one actor on the node of the supervisor, which finds it by its name after a
restart. So they outlive the server's process, the supervisor, routers and workers. A thread restarts
each one on the same port when it ends, so that clients reconnect by themselves. Each ends with the
actor, also when that is killed (see die_with_parent.py). A frozen process is not detected here, but
by each user of the store (see kvstore/stores/circuit_breaker.py).
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from threading import Event, Lock, Thread

import msgspec

from tidemill.cluster.observability.logs import start_logs
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.processes.store_plan import plan_store
from tidemill.cluster.settings import StoreProgram
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.mooncake_store import check_library, is_listening
from tidemill.kvstore.stores.open_store import check_url

START_S_MAX = 30.0
STOP_S_MAX = 3.0
STARTS_MAX = 3
"""The ends before it was ready after which a program is given up. A master that is starting may
break its owner's first call."""

PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
"""The wait before a restart: it doubles each time, and is reset once the process was ready."""

POLL_S = 0.02

PLAN = "store.json"
"""The file with the plan of a detached server's store, in its folder."""

log = logging.getLogger(__name__)


def planned_store(url: str, root: Path | None) -> tuple[str, tuple[StoreProgram, ...]]:
    """Return the URL for workers of the store `url` of `serve`, and the programs to run for it. A detached
    server, in the folder `root`, plans once. Raises StoreError with one line that names the fix."""
    kept = None if root is None else root / PLAN
    if kept is not None and kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=tuple[str, tuple[StoreProgram, ...]])
    plan = plan_store(url)
    check_url(plan.url)
    if plan.has_mooncake:
        check_library()
    if plan.joined and not is_listening(plan.joined):
        raise StoreError(
            f"no Mooncake master answers at {plan.joined}: check its address, "
            "or start one with --store mooncake?size=8GiB"
        )
    if kept is not None:
        kept.write_bytes(msgspec.json.encode((plan.url, plan.programs)))
    return plan.url, plan.programs


class StoreActor:
    """The processes of a store as one actor, which Ray starts again whenever it ends. They end with it."""

    def __init__(self, programs: Sequence[StoreProgram], telemetry: Telemetry) -> None:
        start_logs(telemetry)
        self._processes = [SupervisedProcess(program) for program in programs]
        for process in self._processes:
            process.start()

    def wait_until_ready(self) -> None:
        """Wait for the first start of each. Raises StoreError."""
        for process in self._processes:
            process.wait_until_ready()

    def stop(self) -> None:
        """End them, the last one first."""
        for process in reversed(self._processes):
            process.stop()


class SupervisedProcess:
    """A program that is restarted whenever it ends, until it is stopped."""

    def __init__(self, program: StoreProgram) -> None:
        self._program = program
        self._first_start = Future[None]()  # done when a process is ready, or STARTS_MAX ended before that
        self._stopped = Event()
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = Thread(target=self._run, name=program.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Wait until it is ready. Raises StoreError after STARTS_MAX ends or START_S_MAX."""
        try:
            self._first_start.result(START_S_MAX)
        except TimeoutError:
            raise StoreError(
                f"the {self._program.name} does not answer {START_S_MAX:.0f} s after its start: "
                "use file:///path meanwhile"
            ) from None

    def stop(self) -> None:
        """End the program and wait for its end; STOP_S_MAX lets a memory owner sign off at its master."""
        with self._lock:
            self._stopped.set()
            if self._process is not None:
                self._process.terminate()
        self._thread.join(STOP_S_MAX)
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        """Run the program over all its restarts, in one thread. Linux ends the process with the thread that
        started it, see die_with_parent.py."""
        pause_s, ends = PAUSE_S_MIN, 0
        while not self._stopped.is_set():
            try:
                process = self._start()
            except OSError as error:  # no process or memory
                ended = f"the {self._program.name} cannot be started ({error})"
            else:
                if process is None:
                    return
                with process:
                    if self._becomes_ready(process):
                        pause_s = PAUSE_S_MIN
                        self._set_first_start(None)
                    for _ in process.stdout or ():  # wait for its end
                        pass
                status = process.returncode
                reason = signal.Signals(-status).name if status < 0 else f"status {status}"
                ended = f"the {self._program.name} ended ({reason})"
            ends += 1
            if ends == STARTS_MAX:
                self._set_first_start(StoreError(f"{ended} while it started: use file:///path meanwhile"))
            if not self._stopped.is_set():
                log.warning("%s and will be restarted", ended)
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _start(self) -> "subprocess.Popen[str] | None":
        command = [
            sys.executable,
            "-m",
            "tidemill.cluster.processes.system.die_with_parent",
            str(os.getpid()),
            *self._program.arguments,
        ]
        with self._lock:
            if self._stopped.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C goes to the server only, which ends this process last
            )
            return self._process

    def _becomes_ready(self, process: "subprocess.Popen[str]") -> bool:
        assert process.stdout is not None
        if not self._program.port:
            return process.stdout.readline() != ""
        while process.poll() is None:
            if is_listening(self._program.port):
                return True
            self._stopped.wait(POLL_S)
        return False

    def _set_first_start(self, error: StoreError | None) -> None:
        with contextlib.suppress(InvalidStateError):  # the result of the first start stays
            if error is None:
                self._first_start.set_result(None)
            else:
                self._first_start.set_exception(error)
