"""What a cluster is made of: plain data that travels to the actors unchanged."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tidemill.cluster.messages import Bounds, Hysteresis
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.workers.messages import Role
from tidemill.workers.settings import EngineSettings

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
    "openai",
]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "deepseek_v3", "granite", "openai_gptoss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker. `num_cpus`, `num_gpus` and `resources` (custom ones of Ray) are what Ray reserves for each
    of its ranks; `labels` are those that its node must have: Ray's label selector, values as `a`, `!a`,
    `in(a,b)` or `!in(a,b)`. The ranks of a group are on one node.

    `host` is what its data plane binds to; None binds to the address that the node has in the Ray cluster.
    """

    name: str  # `decode-0`
    role: Role
    engine: EngineSettings
    build: str = "tidemill.workers.engine.build:build_engine"  # called with `engine`, Progress, StartRanks
    host: str | None = "127.0.0.1"
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    tls: MutualTls | None = None  # None: what crosses sockets is plain, and nobody shows who they are
    telemetry: Telemetry = QUIET


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """`broker` moves memory between the workers of a device, once the `expected` ones have been heard.

    Each of the `replicas` hears all workers and places requests by what it has heard and placed itself. The
    first one alone tells workers what people and the broker say. Fleets that lend each other memory have one
    broker: `memory_router` names the router that has it, of another fleet; None is the first one here.
    """

    name: str = "router"
    replicas: int = 1
    build: str = "tidemill.cluster.router.router:Router"  # called with a clock in seconds and the rest
    host: str | None = "127.0.0.1"
    broker: bool = True
    expected: frozenset[str] = frozenset()  # names of workers
    memory_router: str | None = None
    ttft_s_max: float = 60.0  # what would wait longer for its first token is refused
    tls: MutualTls | None = None  # as workers have it
    telemetry: Telemetry = QUIET

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(f"{self.name}-{index}" for index in range(1, self.replicas)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What a server was told of the chats of a model. `template` is a file, or the text of a template; None:
    the model's own."""

    template: str | None = None
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"


AUTO = ChatSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The workers of one model, and the routers that place its requests. Clients know it by `names`."""

    workers: tuple[WorkerSettings, ...]
    names: tuple[str, ...] = ("model",)
    router: RouterSettings = field(default_factory=RouterSettings)
    bounds: Mapping[Role, Bounds] = field(default_factory=dict[Role, Bounds])  # none: it is not scaled
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    label: str = ""  # what names of its workers start with: empty where there is one fleet
    chat: ChatSettings = AUTO

    @property
    def model_folder(self) -> Path:
        return self.workers[0].engine.model_folder


def worker_name(label: str, role: Role, index: int) -> str:
    """`decode-0`, or `keeper-decode-0` in the fleet of this label."""
    return f"{label}-{role}-{index}" if label else f"{role}-{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """A whole cluster, of one fleet or several: names of workers and routers are unique.

    `ray_address` joins a running Ray cluster; None starts one on this machine, which ends with the process
    that started it and keeps all that it writes in a folder of its own under `temp_folder`.
    """

    fleets: tuple[FleetSettings, ...]
    ray_address: str | None = None
    namespace: str = "tidemill"  # of the actors' names
    temp_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    object_store_bytes: int = 80 * 2**20  # Ray's own store, which carries next to nothing here
    schedule_timeout_s: float = 600.0  # for nodes with a place for each worker, which may have images to pull

    @property
    def workers(self) -> tuple[WorkerSettings, ...]:
        return tuple(worker for fleet in self.fleets for worker in fleet.workers)

    def telling(self, telemetry: Telemetry) -> "ClusterSettings":
        """The same, where every process tells this about itself."""
        fleets = tuple(
            replace(
                fleet,
                workers=tuple(replace(worker, telemetry=telemetry) for worker in fleet.workers),
                router=replace(fleet.router, telemetry=telemetry),
            )
            for fleet in self.fleets
        )
        return replace(self, fleets=fleets)


def ray_environ(*, joins: bool, token: str = "") -> dict[str, str]:
    """What the environment must hold before Ray and gRPC are first imported; Ray's processes inherit it.

    `token` is the secret between the processes of a cluster of our own; a cluster that is joined has its own.
    """
    quiet = {
        "GRPC_VERBOSITY": "ERROR",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SCHEDULER_EVENTS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do anyway, and warns of until it does
    }
    if joins:
        return quiet
    return {
        **quiet,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every socket on loopback
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }
