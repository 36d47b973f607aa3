"""What a cluster is made of: plain data that travels to the actors unchanged."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.cluster.autoscale import Bounds, Hysteresis
from tidemill.workers.messages import Role
from tidemill.workers.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker. `num_cpus` and `num_gpus` are what Ray reserves for each of its ranks; with none it always
    finds a place. The ranks of a group are on one node.

    `host` is what its data plane binds to; None binds to the address that the node has in the Ray cluster.
    """

    name: str  # `decode-0`
    role: Role
    engine: EngineSettings
    build: str = "tidemill.workers.build:build_engine"  # called with `engine`, Progress, StartRanks
    host: str | None = "127.0.0.1"
    num_cpus: float = 0.0
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """`broker` moves memory between the workers of a device, once the `expected` ones have been heard.

    Each of the `replicas` hears all workers and places requests by what it has heard and placed itself. The
    first one alone tells workers what people and the broker say.
    """

    name: str = "router"
    replicas: int = 1
    build: str = "tidemill.cluster.router:Router"  # called with a clock in seconds and the rest
    host: str | None = "127.0.0.1"
    broker: bool = True
    expected: frozenset[str] = frozenset()  # names of workers
    ttft_s_max: float = 60.0  # what would wait longer for its first token is refused

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(f"{self.name}-{index}" for index in range(1, self.replicas)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """A whole cluster. `ray_address` joins a running Ray cluster; None starts one on this machine, which ends
    with the process that started it and keeps all that it writes in a folder of its own under `temp_folder`.
    """

    workers: tuple[WorkerSettings, ...]
    router: RouterSettings = field(default_factory=RouterSettings)
    ray_address: str | None = None
    namespace: str = "tidemill"  # of the actors' names
    temp_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    bounds: Mapping[Role, Bounds] = field(
        default_factory=dict[Role, Bounds]
    )  # of autoscaling; none: no scaling
    hysteresis: Hysteresis = field(default_factory=Hysteresis)  # the same
    object_store_bytes: int = 80 * 2**20  # Ray's own store, which carries next to nothing here
    process_wait_s_max: float = 120.0  # until Ray has a process for each actor


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
