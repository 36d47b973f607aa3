"""Starts and stops a cluster: Ray, the router, the workers. Either all are ready, or nothing is left."""

import contextlib
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import ray
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.settings import ClusterSettings, FleetSettings, RouterSettings, WorkerSettings
from tidemill.cluster.supervisor.node_fit import Node, demand_of, missing, plan
from tidemill.cluster.supervisor.processes import children, end, with_descendants
from tidemill.cluster.supervisor.router_actor import RouterActor
from tidemill.cluster.supervisor.start_progress import shown
from tidemill.cluster.supervisor.worker_actor import WorkerActor, find_router, options_of
from tidemill.cluster.worker.worker_process import Failed, Loading, Ready, State
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import WorkerInfo

RAY: Any = ray  # much of it has no types

LIVES = {"max_restarts": -1, "max_task_retries": 0}

LOOK_S = 0.1
TELL_S = 60.0
"""So often it is said what is still waited for."""

GRACE_S = 3.0
CONNECT_S_MAX = 5.0
RAY_STARTS_MAX = 4
RAY_WAS_SLOW = "timed out during startup"
"""Ray gives a node of its own 30 s and no more, which a busy machine may need several times."""

TEMP_PATH_LENGTH_MAX = 40
"""Ray puts sockets 60 characters below it, and a socket's path is at most 107 long."""


class LaunchError(TidemillError):
    """The cluster cannot start; one line that says why."""


class Cluster:
    """A running cluster. `start_cluster` makes it, `stop` ends it, both in the main thread outside of any
    event loop."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._infos: dict[str, WorkerInfo] = {}
        self._settings = settings
        self._temp_folder: Path | None = None
        self._processes: list[psutil.Process] = []  # Ray's own, if we started it
        self._routers: list[Any] = []
        self._actors: dict[str, Any] = {}
        self._places: dict[str, Any] = {}  # placement groups of workers, by name
        self._homes: dict[str, str] = {}  # ids of the nodes where workers were put

    def workers(self, fleet: FleetSettings) -> tuple[WorkerInfo, ...]:
        """Those that the fleet started with."""
        return tuple(self._infos[worker.name] for worker in fleet.workers)

    def router(self, fleet: FleetSettings) -> RouterClient:
        """A new client of the fleet's routers, for one event loop of this process."""
        namespace = self._settings.namespace
        found = (find_router(name, namespace) for name in fleet.router.names)
        return RouterClient(*found, tls=fleet.router.tls)

    def memory(self, fleet: FleetSettings) -> RouterClient | None:
        """A new client of the router that says the budgets of the fleet's workers, if it is of another
        fleet."""
        if fleet.router.memory_router is None:
            return None
        find = find_router(fleet.router.memory_router, self._settings.namespace)
        return RouterClient(find, tls=fleet.router.tls)

    def peers(self, fleet: FleetSettings) -> WorkerClients:
        """New streams to the fleet's workers, for one event loop of this process."""
        return WorkerClients(tls=fleet.router.tls)

    def start_ray(self) -> None:
        settings = self._settings
        options: dict[str, Any] = {"address": settings.ray_address}
        if settings.ray_address is None:
            if len(str(settings.temp_folder)) > TEMP_PATH_LENGTH_MAX:
                raise LaunchError(
                    f"{settings.temp_folder} is too long a path for Ray's sockets: set TMPDIR=/tmp"
                )
            self._temp_folder = Path(tempfile.mkdtemp(prefix="tidemill-", dir=settings.temp_folder))
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
        ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with _told_to_stop():
                namespace = self._settings.namespace
                RAY.init(**options, namespace=namespace, logging_level="error", log_to_driver=True)
        except Exception as error:
            raise LaunchError(f"Ray does not start: {_line(error)}") from error
        except SystemExit:
            raise KeyboardInterrupt from None  # Ray's own answer to SIGTERM
        finally:
            for number, disposition in ours.items():  # Ray's own would end the process without a stop
                signal.signal(number, disposition)
            self._processes = [process for process in children() if process not in before]

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None:
        """What the nodes of Ray have not free for these workers, beside all that runs there now, in one line;
        None when there is a place for each. May be called on another thread."""
        return missing(map(demand_of, workers), _nodes())

    def start_actors(self) -> None:
        settings = self._settings
        try:
            here = NodeAffinitySchedulingStrategy(RAY.get_runtime_context().get_node_id(), soft=False)
            for fleet in settings.fleets:
                for name in fleet.router.names:  # beside the frontend, which they are lost with anyway
                    options = {**LIVES, "num_cpus": 0, "name": name, "scheduling_strategy": here}
                    self._routers.append(RAY.remote(RouterActor).options(**options).remote(fleet.router))
                for worker in fleet.workers:
                    self.add_worker(worker, fleet.router)
        except ValueError as error:
            raise LaunchError(
                f"the actors cannot be created in namespace {settings.namespace}: {error}"
            ) from error

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None:
        """Start one; its first heartbeat to these routers says that it is ready. Where there is no place for
        it, see `lacks`, it waits for one. May be called on another thread."""
        demand = demand_of(worker)
        there: dict[str, list[str]] = {}
        for name, node in self._homes.items():
            there.setdefault(name.rpartition("-")[0], []).append(node)
        home = plan([demand], _nodes(), there).homes.get(worker.name)
        if home is not None:
            self._homes[worker.name] = home
        place = self._places[worker.name] = RAY.util.placement_group(
            [dict(demand.each)] * demand.ranks,
            strategy="STRICT_PACK",
            bundle_label_selector=[dict(demand.labels)] * demand.ranks,
            _soft_target_node_id=home,
        )
        options = {**LIVES, **options_of(worker, place, 0)}
        actor = RAY.remote(WorkerActor).options(**options, name=worker.name)
        try:
            self._actors[worker.name] = actor.remote(worker, routers, self._settings.namespace, place)
        except ValueError:  # the name is taken
            self.remove_worker(worker.name)
            raise

    def remove_worker(self, name: str) -> None:
        """End one for good, if it is there: it should have been drained. May be called on another thread."""
        actor, place = self._actors.pop(name, None), self._places.pop(name, None)
        self._homes.pop(name, None)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            if actor is not None:
                RAY.kill(actor, no_restart=True)
            if place is not None:
                RAY.util.remove_placement_group(place)

    def wait_until_ready(
        self, show: Callable[[str, State], None], say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """Until the router knows every worker. Raises LaunchError with the first thing that went wrong. A
        worker that has a place is waited for however long its process takes to start."""
        began_s = told_s = clock()
        ready: dict[str, WorkerInfo] = {}
        silent = {worker.name: worker for worker in self._settings.workers}  # no process yet
        asked: dict[Any, str] = {}
        while len(ready) < len(self._actors):
            waited = set(asked.values()) | set(ready)
            asked |= {
                actor.state.remote(): name for name, actor in self._actors.items() if name not in waited
            }
            answers, _ = RAY.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)
            for answer in answers:
                name = asked.pop(answer)
                silent.pop(name, None)
                state = _state(name, answer)
                show(name, state)
                if isinstance(state, Failed):
                    raise LaunchError(f"{name}: {state.reason}")
                if isinstance(state, Ready):
                    ready[name] = state.info
            if silent and (now_s := clock()) - told_s >= TELL_S:
                told_s = now_s
                lacks = self.unschedulable_reason(
                    *(one for one in silent.values() if not self._has_place(one))
                )
                if lacks and told_s - began_s >= self._settings.schedule_timeout_s:
                    raise LaunchError(lacks)
                say(_still(silent, told_s - began_s, lacks))
            time.sleep(LOOK_S)
        self._infos = ready

    def _has_place(self, worker: WorkerSettings) -> bool:
        """Whether Ray has reserved what it wants."""
        return RAY.util.placement_group_table(self._places[worker.name])["state"] != "PENDING"

    def stop(self) -> None:
        """End every process and remove every file of the cluster; of one that was joined, our actors. May
        be called at any time, also twice."""
        processes = with_descendants(self._processes)
        for actor in [*self._actors.values(), *self._routers]:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                RAY.kill(actor, no_restart=True)
        # A Ray of our own ends with its places; taking one away has its actors leave in order, with words.
        for place in self._places.values() if self._temp_folder is None else ():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                RAY.util.remove_placement_group(place)
        self._actors.clear()
        self._places.clear()
        self._routers.clear()
        grace_s = GRACE_S if RAY.is_initialized() else 0.0
        RAY.shutdown()
        end(processes, grace_s)
        if self._temp_folder is not None:
            shutil.rmtree(self._temp_folder, ignore_errors=True)


@contextlib.contextmanager
def _told_to_stop() -> Generator[None]:
    """Raises KeyboardInterrupt at the end if a signal came meanwhile: what its handler raised may have been
    swallowed, in a callback or a broad `except`."""
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
            if {signal.SIGTERM, signal.SIGINT}.intersection(reader.recv(4096)):
                raise KeyboardInterrupt


def start_cluster(
    settings: ClusterSettings, console: Console, clock: Callable[[], float] = time.monotonic
) -> Cluster:
    """Start everything and wait until the router knows every worker. The environment holds `ray_environ`.

    Raises LaunchError. Nothing is left running then, nor when it is interrupted.
    """
    cluster = Cluster(settings)
    try:
        with shown(console, clock) as show:
            show("Ray", Loading(0, 0))
            cluster.start_ray()
            show("Ray", None)
            for worker in settings.workers:
                show(worker.name, Loading(0, 0))
            if lacks := cluster.unschedulable_reason(*settings.workers):
                if settings.ray_address is None:  # nobody else can add a node
                    raise LaunchError(lacks)
                console.print(f"waiting up to {settings.schedule_timeout_s:g} s: {lacks}", soft_wrap=True)
            cluster.start_actors()
            cluster.wait_until_ready(show, console.print, clock)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # a word of Ray's, like auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S_MAX).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`, "
            "or leave --ray-address out, and one is started here"
        ) from error


def _state(name: str, answer: object) -> State:
    try:
        return RAY.get(answer)
    except ray.exceptions.RayError as error:
        raise LaunchError(f"{name} died while it started: {_line(error)}") from error


def _nodes() -> list[Node]:
    """Those that are up."""
    free = cast("dict[str, dict[str, float]]", available_resources_per_node())
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"]) or node["Resources"],  # a young node has not told yet
            labels=node["Labels"],
        )
        for node in RAY.nodes()
        if node["Alive"]
    ]


def _still(names: Iterable[str], waited_s: float, lacks: str | None) -> str:
    why = lacks or "Ray starts processes for them"
    return f"still waiting for {', '.join(names)} after {waited_s:.0f} s: {why}"


def _line(error: Exception) -> str:
    """The line of Ray's message that says what happened: the last one of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]
