"""What a server tells of itself for a support bundle: settings, software, nodes of Ray, the ends of logs.

Nothing of it has keys or texts of requests: settings name files of secrets, logs have neither, and what looks
like a secret is taken out.
"""

import platform
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import ray

from tidemill import __version__
from tidemill.cluster.edge.requests.context import Parts
from tidemill.cluster.observability.redact import plain, without_secrets
from tidemill.cluster.server.endpoint import Endpoint
from tidemill.cluster.settings import ClusterSettings
from tidemill.kvstore.errors import TidemillError

RAY: Any = ray  # much of it has no types

TAIL_BYTES = 64 << 10
FILES_MAX = 64

OWN_LOGS = ("raylet*", "gcs_server*")
"""In the log folder of a Ray cluster of our own. One that was joined has what others did in these."""


def parts_of(endpoint: Endpoint, settings: ClusterSettings, lines: Iterable[str]) -> Parts:
    """`lines` are the last ones that this process logged."""
    return {
        "config": lambda: config_of(endpoint, settings),
        "software": software,
        "nodes": _nodes,
        "logs": lambda: {"frontend": without_secrets("\n".join(list(lines))), **_logs(settings)},
    }


def config_of(endpoint: Endpoint, settings: ClusterSettings) -> dict[str, object]:
    security = endpoint.security
    return {
        "endpoint": {
            "host": endpoint.host,
            "port": endpoint.port,
            "grpc_port": endpoint.grpc_port,
            "limits": plain(endpoint.limits),
            "telemetry": plain(endpoint.telemetry),
            "tls": plain(security.tls),
            "keys": len(security.keys),
            "keys_of_operators": sum(key.operator for key in security.keys),
        },
        "cluster": plain(settings),
    }


def software() -> dict[str, object]:
    """Versions of this process."""
    packages = {one.metadata["Name"]: one.version for one in distributions()}
    return {
        "tidemill": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": dict(sorted(packages.items())),
    }


def _nodes() -> list[object]:
    try:
        found = RAY.nodes()
    except Exception as error:
        raise TidemillError(f"Ray does not tell its nodes: {error}") from error
    return [plain(one) for one in found]


def _logs(settings: ClusterSettings) -> dict[str, str]:
    """Of this node: those of our actors, and Ray's own if it is ours."""
    try:
        assert RAY.is_initialized(), "Ray was not started"
        folder = Path(RAY.init(ignore_reinit_error=True).address_info["session_dir"], "logs")
        job: str = RAY.get_runtime_context().get_job_id()
    except Exception as error:
        raise TidemillError(f"Ray does not tell its logs: {error}") from error
    patterns = (f"worker-*-{job}-*", *(OWN_LOGS if settings.ray_address is None else ()))
    return tails(file for pattern in patterns for file in folder.glob(pattern))


def tails(files: Iterable[Path]) -> dict[str, str]:
    """The ends of those that have something, by name; of too many, of those that were written last."""
    sizes = [(file.stat().st_mtime, file) for file in files if file.stat().st_size]
    newest = [file for _, file in sorted(sizes, reverse=True)[:FILES_MAX]]
    return {file.name: _tail(file) for file in sorted(newest)}


def _tail(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return without_secrets(opened.read(TAIL_BYTES).decode(errors="replace"))
