"""The settings of a cluster: plain data that the supervisor sends to the actors unchanged."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tidemill.cluster.messages import Bounds, Hysteresis
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.workers.messages import Role
from tidemill.workers.pickled_by_name import PickledByName
from tidemill.workers.settings import HostedSettings

ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "granite",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "gemma4",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "openai",
]
GenerationConfig = Literal["auto", "vllm"]
HostedTools = Literal["ignore", "refuse"]
ReasoningParser = Literal[
    "auto",
    "none",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "kimi_k2",
    "minimax_m2",
    "minimax_m2_append_think",
    "mistral",
    "nemotron_v3",
    "openai_gptoss",
]


OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's object store, which is nearly unused."""


OWN_ENGINE = {
    "build": "tidemill.workers.engine.build:build_engine",
    "check": "tidemill.workers.engine.build:check_settings",
}
"""The names of the Build and the Check of our own engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(PickledByName):
    """The settings of one worker.

    Ray reserves `num_cpus`, `num_gpus` and `resources` (custom resources of Ray) for each of its
    ranks. `labels` is Ray's label selector for its node, with the values `a`, `!a`, `in(a,b)` or
    `!in(a,b)`. The ranks of a group run on one node, or on up to `tensor_parallel_nodes` of them.

    The gRPC server of the worker binds to `host`. None binds to the node's address in the Ray
    cluster.
    """

    name: str  # `decode-0`
    role: Role
    engine: HostedSettings
    build: str = OWN_ENGINE["build"]  # a Build of workers/contract/engine.py
    check: str = OWN_ENGINE["check"]  # its Check
    host: str | None = "127.0.0.1"
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    tls: MutualTls | None = None  # None: plain sockets without authentication
    telemetry: Telemetry = QUIET


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(PickledByName):
    """The settings of the routers of one fleet.

    With `broker` the router moves memory between the workers of a device, after the first heartbeat
    of every worker in `expected`. Each of the `replicas` receives the heartbeats of all workers. It
    places requests by these and by its own bookings. Only the first replica sends commands of
    operators and the broker. Fleets that lend each other memory share one broker. `memory_router`
    names the router that runs it, if that belongs to another fleet; None is the first replica. A
    replica listens on its port of `ports`, also after a restart; without ports on any free one.
    """

    name: str = "router"
    replicas: int = 1
    ports: tuple[int, ...] = ()
    build: str = "tidemill.cluster.router.router:Router"  # called with a clock and settings
    host: str | None = "127.0.0.1"
    broker: bool = True
    expected: frozenset[str] = frozenset()  # names of workers
    memory_router: str | None = None
    ttft_s_max: float = math.inf  # the limit of the time to first token
    held_max: float = math.inf  # the limit of requests that wait for a worker to start
    join_port: int | None = None  # of the first replica, for edges with tokens; None: they cannot join
    cache_folder: Path | None = None  # for compiled placement; None: the definition places
    tls: MutualTls | None = None
    telemetry: Telemetry = QUIET

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(f"{self.name}-{index}" for index in range(1, self.replicas)))

    def port_of(self, name: str) -> int:
        """Return the port of the replica of this name; 0 is any free one."""
        return self.ports[self.names.index(name)] if self.ports else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings(PickledByName):
    """The chat settings of a model. `template` is a path or a text; None: the model's own."""

    template: str | None = None
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    generation_config: GenerationConfig = "auto"


AUTO = ChatSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(PickledByName):
    """The workers and routers of one model. Clients use any of the `names`."""

    workers: tuple[WorkerSettings, ...]
    names: tuple[str, ...] = ("model",)
    router: RouterSettings = field(default_factory=RouterSettings)
    bounds: Mapping[Role, Bounds] = field(default_factory=dict[Role, Bounds])  # empty: no autoscaling
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    label: str = ""  # the prefix of its workers' names; empty in a single fleet
    chat: ChatSettings = AUTO
    prefix_caching: bool = True  # requests use pages of earlier ones
    cold_start_s_max: float | None = None  # see ServedModel; None: the fleet is never scaled to zero

    @property
    def model_folder(self) -> Path:
        return self.workers[0].engine.model_folder

    @property
    def templates(self) -> dict[Role, WorkerSettings]:
        """The first worker of each role."""
        return {worker.role: worker for worker in reversed(self.workers)}

    def worker(self, role: Role, name: str) -> WorkerSettings:
        """Return the settings of the worker of this name; a new one copies the first of its role."""
        known = {worker.name: worker for worker in self.workers}
        return known.get(name) or replace(self.templates[role], name=name)


def worker_name(label: str, role: Role, index: int) -> str:
    """Return `decode-0`, or `keeper-decode-0` in the fleet with the label `keeper`."""
    return f"{label}-{role}-{index}" if label else f"{role}-{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreProgram(PickledByName):
    """A Python program to run. It is ready when it accepts connections at `port` (HOST:PORT), or, without a
    port, when it has written a line."""

    name: str
    arguments: tuple[str, ...]
    port: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings(PickledByName):
    """The settings of a cluster of one or more fleets. Names of workers and routers are unique.

    With `ray_address` the supervisor joins a running Ray cluster. With None it starts one on this
    machine. That cluster ends with the process that started it, and writes only to its own folder
    under `temp_folder`.
    """

    fleets: tuple[FleetSettings, ...]
    ray_address: str | None = None
    namespace: str = "tidemill"  # Ray's namespace for the names of the actors
    temp_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    object_store_bytes: int = OBJECT_STORE_BYTES
    detached_folder: Path | None = None  # of a server that lasts until `tidemill down`; it has joined a Ray
    authority_key: Path | None = None  # signs certificates of edges that join by a token
    programs: tuple[StoreProgram, ...] = ()  # of the store, on the node of the supervisor
    schedule_timeout_s: float = 600.0  # for nodes with room for every worker; they may pull images

    @property
    def workers(self) -> tuple[WorkerSettings, ...]:
        return tuple(worker for fleet in self.fleets for worker in fleet.workers)

    def with_telemetry(self, telemetry: Telemetry) -> "ClusterSettings":
        """Return a copy in which every process reports this telemetry."""
        fleets = tuple(
            replace(
                fleet,
                workers=tuple(replace(worker, telemetry=telemetry) for worker in fleet.workers),
                router=replace(fleet.router, telemetry=telemetry),
            )
            for fleet in self.fleets
        )
        return replace(self, fleets=fleets)


WORKER_ENVIRON = {"GOMP_SPINCOUNT": "5000", "RAY_worker_niceness": "0"}
"""Variables for workers, unless the environment has them (decision 32). A thread that waits in OpenMP
sleeps after about 10 us, so that it leaves its core to the one that it waits for. Ray would run workers below
all else on the machine."""


def ray_environ(*, joins: bool, token: str = "") -> dict[str, str]:
    """Return the environment variables to set before the first import of Ray and gRPC.

    Ray's processes inherit them. `token` is the secret between the processes of a cluster that we
    start. A cluster that we join (`joins`) has its own.
    """
    quiet = {
        "GRPC_VERBOSITY": "ERROR",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SCHEDULER_EVENTS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of its future default
        "PYTHONSAFEPATH": "1",  # modules in the working directory are none of ours
    }
    if joins:
        return quiet
    return {
        **quiet,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every socket on loopback
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }


def authority(host: str, port: int) -> str:
    """Return an address as URLs have it: one of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
