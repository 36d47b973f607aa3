"""Start and stop a cluster: Ray, the routers, the workers. A failed start leaves nothing running."""

import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.exceptions
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from tidemill.cluster.processes.scaling.journal import ClusterPlan
from tidemill.cluster.processes.scaling.node_fit import demand_of, unschedulable_reason
from tidemill.cluster.processes.start_progress import show_progress
from tidemill.cluster.processes.supervisor import (
    BESIDE,
    Actors,
    Supervisor,
    kill_actors,
    stop_plan,
)
from tidemill.cluster.processes.supervisor_client import (
    RAY,
    SUPERVISOR,
    keep_stdout,
    nodes,
    note_signals,
)
from tidemill.cluster.processes.system.children import (
    STOP_SIGNALS,
    children,
    end,
    has_ended,
    with_descendants,
)
from tidemill.cluster.processes.system.private_folder import private_folder, too_long, writers
from tidemill.cluster.processes.worker_actor import find_router
from tidemill.cluster.rpc.catalogue_client import CatalogueWriter
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.settings import ClusterSettings, FleetSettings, WorkerSettings
from tidemill.cluster.worker.worker_process import Failed, Loading, Ready, State
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import WorkerInfo

POLL_S = 0.1
CHECK_S = 1.0
TOUCH_S = 3600.0
"""The period in which the files of our Ray get a new time: programs remove old ones from /tmp."""

REPORT_S = 60.0
"""The period of the messages about workers that have not started yet."""

GRACE_S = 3.0
KILL_ACTORS_S_MAX = 10.0
"""The time for Ray to kill our actors. After that all processes of a Ray of our own are killed."""

CONNECT_S_MAX = 5.0
RAY_STARTS_MAX = 4
RAY_WAS_SLOW = "timed out during startup"
"""The text of the error when a local node of Ray takes longer than Ray's fixed 30 s; a busy machine may need
several attempts."""

ESSENTIAL = {"gcs_server": "GCS", "raylet": "raylet"}
"""The processes of Ray without which nothing can be started or restarted, and their names in messages."""


class _Nowhere(list[str]):
    """The directories that Ray adds to the import path of workers: not even the working directory."""

    def extend(self, _: object) -> None:
        pass


def job_of_workers() -> Any:  # noqa: ANN401 - of Ray
    """Return a job of Ray whose workers import nothing from this process's working directory."""
    job: Any = JobConfig()
    job._py_driver_sys_path = _Nowhere()  # noqa: SLF001 - Ray has no option for it
    return job


class LaunchError(TidemillError):
    """The cluster cannot start; the message is one line with the reason."""


class RayEnded(TidemillError):
    """A process of Ray that we started has ended, so this cluster cannot go on."""


class Cluster:
    """A running cluster. Call `start_cluster` and `stop` in the main thread, outside of any event loop."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._infos: dict[str, WorkerInfo] = {}
        self._settings = settings
        self._temp_folder: Path | None = None
        self._files = contextlib.ExitStack()
        self._processes: list[psutil.Process] = []  # of Ray, if we started it
        self._sockets: tuple[Path, ...] = ()  # of our own Ray, over which new workers reach it
        self._essential: dict[str, psutil.Process] = {}  # those of ESSENTIAL, by their names in messages
        self._supervisor: Any = None
        self._plan = ClusterPlan()

    def workers(self, fleet: FleetSettings) -> tuple[WorkerInfo, ...]:
        """Return the workers that were ready at the start, at least one."""
        plan = self._plan.fleets[self._settings.fleets.index(fleet)]
        return tuple(self._infos[name] for name in plan.workers if name in self._infos)

    def router(self, fleet: FleetSettings, *names: str) -> RouterClient:
        """Return a new client of these routers, for one event loop of this process."""
        finders = (find_router(name, self._settings.namespace) for name in names)
        return RouterClient(*finders, tls=fleet.router.tls)

    def catalogue_writers(self) -> dict[str, CatalogueWriter]:
        """Return new clients that publish the catalogue to each router, by name."""
        namespace = self._settings.namespace
        return {
            name: CatalogueWriter(find_router(name, namespace), fleet.router.tls)
            for fleet in self._settings.fleets
            for name in fleet.router.names
        }

    def start_ray(self) -> None:
        settings = self._settings
        options: dict[str, Any] = {"address": settings.ray_address}
        if settings.ray_address is None:
            if reason := too_long(settings.temp_folder):
                raise LaunchError(reason)
            # Ray makes its folder one that all users may write to.
            folder = private_folder("tidemill-", settings.temp_folder)
            self._temp_folder = self._files.enter_context(folder)
            options = {
                "address": "local",
                "_temp_dir": str(self._temp_folder),
                "include_dashboard": False,
                "object_store_memory": settings.object_store_bytes,
            }
        else:
            _check_reachable(settings.ray_address)
        for _ in range(RAY_STARTS_MAX - 1):
            try:
                return self._init_ray(options)
            except LaunchError as error:
                if RAY_WAS_SLOW not in str(error):
                    raise
                end(with_descendants(self._processes), 0.0)
        return self._init_ray(options)

    def _init_ray(self, options: Mapping[str, Any]) -> None:
        before = children()
        dispositions = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        try:
            with _raise_interrupts():
                namespace = self._settings.namespace
                keep_stdout()
                note_signals(STOP_SIGNALS)
                quiet = {"logging_level": "error", "log_to_driver": True}
                RAY.init(**options, namespace=namespace, job_config=job_of_workers(), **quiet)
        except Exception as error:
            raise LaunchError(f"Ray does not start: {_line(error)}") from error
        finally:
            for number, disposition in dispositions.items():  # Ray's would end the process without `stop`
                signal.signal(number, disposition)
            self._processes = [process for process in children() if process not in before]
        folder = self._settings.detached_folder
        found = self._processes if folder is None else writers(folder)
        named = {process.name(): process for process in found}
        self._essential = {ESSENTIAL[name]: named[name] for name in ESSENTIAL.keys() & named.keys()}
        if (own := self._temp_folder or folder) is not None:
            self._sockets = tuple(own.glob("**/sockets/*"))

    def check(self) -> None:
        """Raise RayEnded if a process or a socket of our own Ray that the cluster needs is gone."""
        for name, process in self._essential.items():
            if has_ended(process):
                raise RayEnded(f"Ray's {name} has ended, and with it this server: start it again")
        if lost := [path for path in self._sockets if not path.exists()]:
            raise RayEnded(f"{lost[0]} was removed, and no worker starts without it: start the server again")

    async def run(self) -> None:
        """Call `check` until it raises RayEnded or this is cancelled."""
        touched_s = -math.inf
        own = self._temp_folder or self._settings.detached_folder

        async def check() -> None:
            nonlocal touched_s
            self.check()
            if own is not None and (now_s := time.monotonic()) - touched_s > TOUCH_S:
                touched_s = now_s
                await asyncio.to_thread(touch, own)

        await every(CHECK_S, check, "Ray's processes", fatal=(RayEnded,))

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None:
        """Explain in one line why Ray cannot schedule these workers beside all that runs now; None if it
        can."""
        return unschedulable_reason(map(demand_of, workers), nodes())

    def has_supervisor(self) -> bool:
        """Return whether the cluster has been started before."""
        with contextlib.suppress(ValueError):
            return RAY.get_actor(SUPERVISOR, self._settings.namespace) is not None
        return False

    def start_supervisor(self) -> None:
        """Start the supervisor, which starts the routers and workers. Raises LaunchError."""
        settings = self._settings
        # If this node ends, the supervisor has to end the actors of the others.
        here = NodeAffinitySchedulingStrategy(RAY.get_runtime_context().get_node_id(), soft=True)
        options = {**BESIDE, "name": SUPERVISOR, "scheduling_strategy": here}
        lasts = settings.detached_folder is not None
        job_id = None if lasts else RAY.get_runtime_context().get_job_id()
        try:
            self._supervisor = (
                RAY.remote(Supervisor)
                .options(**options, get_if_exists=lasts)
                .remote(settings, secrets.token_hex(8), job_id)
            )
        except ValueError as error:
            raise LaunchError(
                f"a server runs in the namespace {settings.namespace} of this Ray cluster: end it, or give "
                "this one another `namespace`; what a killed server has left there is gone after 10 s"
            ) from error
        started = self._supervisor.started.remote()
        while not RAY.wait([started], timeout=POLL_S)[0]:
            self.check()
        try:
            self._plan = RAY.get(started)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"the supervisor cannot start the cluster: {_line(error)}") from error

    def wait_until_ready(
        self, show: Callable[[str, State], None], write: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """Wait until the router knows every worker. Raises LaunchError with the first failure. A worker that
        is scheduled may take any time to start."""
        start_s = reported_s = clock()
        ready: dict[str, WorkerInfo] = {}
        without_process = {worker.name: worker for worker in self._settings.workers}
        actors = self._find_actors()
        calls: dict[Any, str] = {}
        while not self._is_enough(ready):
            self.check()
            waited = set(calls.values()) | set(ready)
            calls |= {actor.state.remote(): name for name, actor in actors.items() if name not in waited}
            answers, _ = RAY.wait(list(calls), num_returns=len(calls), timeout=POLL_S)
            for answer in answers:
                name = calls.pop(answer)
                without_process.pop(name, None)
                state = _state(name, answer)
                show(name, state)
                if isinstance(state, Failed):
                    raise LaunchError(f"{name}: {state.reason}")
                if isinstance(state, Ready):
                    ready[name] = state.info
            if without_process and (now_s := clock()) - reported_s >= REPORT_S:
                reported_s = now_s
                reason = self.unschedulable_reason(
                    *(worker for worker in without_process.values() if not self._is_scheduled(worker))
                )
                if reason and reported_s - start_s >= self._settings.schedule_timeout_s:
                    raise LaunchError(reason)
                write(
                    f"still waiting for {', '.join(without_process)} after {reported_s - start_s:.0f} s: "
                    f"{reason or 'Ray starts processes for them'}"
                )
            time.sleep(POLL_S)
        self._infos = ready
        self._supervisor.serves.remote()

    def _find_actors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in self._plan.workers:
            with contextlib.suppress(ValueError):  # it has left
                found[name] = RAY.get_actor(name, self._settings.namespace)
        return found

    def _is_enough(self, ready: Collection[str]) -> bool:
        """Return whether these workers can serve: all of them, or after the first start one of each fleet."""
        if not self._plan.served:
            return len(ready) == len(self._plan.workers)
        return all(not fleet.workers.keys().isdisjoint(ready) for fleet in self._plan.fleets)

    def _is_scheduled(self, worker: WorkerSettings) -> bool:
        placement_group = RAY.util.get_placement_group(worker.name)
        return RAY.util.placement_group_table(placement_group)["state"] != "PENDING"

    def stop(self) -> None:
        """End every process and remove every file of the cluster, or only our actors if Ray was joined. May
        be called at any time, also twice."""
        processes = with_descendants(self._processes)
        if self._supervisor is not None and self._settings.detached_folder is None:
            # A service manager may end all processes together. Then Ray's calls would wait for a minute.
            ending = threading.Thread(target=self._end_actors, daemon=True)
            ending.start()
            until_s = time.monotonic() + KILL_ACTORS_S_MAX
            while ending.is_alive() and not self._ray_has_ended():
                if self._essential and time.monotonic() > until_s:
                    end(processes, 0.0)
                ending.join(POLL_S)
        if self._ray_has_ended():
            end(processes, 0.0)  # they would wait for each other
        self._supervisor = None
        grace_s = GRACE_S if RAY.is_initialized() else 0.0
        RAY.shutdown()
        end(processes, grace_s)
        if self._temp_folder is not None:  # a dead raylet's children are not below this process
            end(writers(self._temp_folder), 0.0)
        self._files.close()

    def _ray_has_ended(self) -> bool:
        """Return whether a process of our own Ray that the cluster needs has ended."""
        return any(map(has_ended, self._essential.values()))

    def _end_actors(self) -> None:
        """Kill all actors. A joined Ray keeps a supervisor, which does the same, until all are gone."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            joined = self._temp_folder is None
            actors = Actors(self._settings.namespace)
            plan = stop_plan(self._settings.namespace)
            actors.kill(SUPERVISOR, restart=joined)  # it creates nothing any more
            if joined:
                kill_actors(plan, actors)
                actors.kill(SUPERVISOR)
                return
            # Our own Ray ends with its placement groups. Removing one would send its actors SIGTERM,
            # which they log.
            for name in (*plan.workers, *plan.routers):
                actors.kill(name)
            actors.remove_store()


@contextlib.contextmanager
def _raise_interrupts() -> Generator[None]:
    """Raise KeyboardInterrupt at the end if one of STOP_SIGNALS came within the block. The exception of the
    signal's own callback may have been swallowed by another callback or a broad `except`."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.settimeout(0)
        writer.settimeout(0)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
        with contextlib.suppress(BlockingIOError):
            if STOP_SIGNALS.intersection(reader.recv(4096)):
                raise KeyboardInterrupt


def start_cluster(
    settings: ClusterSettings,
    console: Console,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    *,
    wait: Callable[[], object] = lambda: None,
) -> Cluster:
    """Start everything and wait until the router knows every worker. The environment must contain
    `ray_environ`. `wait` is called when Ray runs, and `check` if the cluster of a detached server is new.
    Raises LaunchError, and what both raise. Nothing is left running after an error or an interrupt."""
    cluster = Cluster(settings)
    try:
        with show_progress(console, clock) as show:
            show("Ray", Loading(0, 0))
            cluster.start_ray()
            show("Ray", None)
            wait()
            for worker in settings.workers:
                show(worker.name, Loading(0, 0))
            if reason := cluster.unschedulable_reason(*settings.workers):
                if settings.ray_address is None:  # no node can join a Ray that we start
                    raise LaunchError(reason)
                console.print(f"waiting up to {settings.schedule_timeout_s:g} s: {reason}", soft_wrap=True)
            if settings.detached_folder is not None and not cluster.has_supervisor():
                check()
            cluster.start_supervisor()
            cluster.wait_until_ready(show, console.print, clock)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def touch(folder: Path) -> None:
    """Give everything in a folder a new time, so that a program that removes old files leaves it."""
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # it has just gone
            os.utime(path, follow_symlinks=False)


def _check_reachable(address: str) -> None:
    """Raise LaunchError if no process listens at the address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # a keyword of Ray, like auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S_MAX).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`, "
            "or leave out --ray-address to start one here"
        ) from error


def _state(name: str, answer: object) -> State:
    try:
        return RAY.get(answer)
    except ray.exceptions.RayError as error:
        raise LaunchError(f"{name} crashed while it started: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Return the line of Ray's message with the cause: the last one of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]
