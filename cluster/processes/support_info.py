"""The facts about a server for a support bundle: settings, software, nodes of Ray, the ends of
logs.

They contain neither keys nor texts of requests. Settings have the paths of files with secrets, logs
have neither, and everything that looks like a secret is redacted.
"""

import platform
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from tidemill import __version__
from tidemill.cluster.edge.requests.context import Parts
from tidemill.cluster.observability.redact import plain, without_secrets
from tidemill.cluster.processes.endpoint.endpoint import Endpoint
from tidemill.cluster.processes.supervisor_client import RAY
from tidemill.cluster.settings import ClusterSettings
from tidemill.kvstore.errors import TidemillError

TAIL_BYTES = 64 << 10
FILES_MAX = 64

OWN_LOGS = ("raylet*", "gcs_server*")
"""The logs of Ray's own processes, for a Ray cluster that we started; others share those of a joined one."""


def support_parts(endpoint: Endpoint, settings: ClusterSettings, lines: Iterable[str]) -> Parts:
    """Return the functions that collect each part; `lines` are the last log lines of this process."""
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
    """Return the versions of Tidemill, Python, the platform and all installed packages."""
    packages = {package.metadata["Name"]: package.version for package in distributions()}
    return {
        "tidemill": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": dict(sorted(packages.items())),
    }


def _nodes() -> list[object]:
    try:
        nodes = RAY.nodes()
    except Exception as error:
        raise TidemillError(f"Ray does not list its nodes: {error}") from error
    return [plain(node) for node in nodes]


def _logs(settings: ClusterSettings) -> dict[str, str]:
    """Return this node's actor logs, plus Ray's logs if Tidemill started Ray."""
    try:
        assert RAY.is_initialized(), "Ray was not started"
        folder = Path(RAY.init(ignore_reinit_error=True).address_info["session_dir"], "logs")
        job: str = RAY.get_runtime_context().get_job_id()
    except Exception as error:
        raise TidemillError(f"Ray does not show its logs: {error}") from error
    patterns = (f"worker-*-{job}-*", *(OWN_LOGS if settings.ray_address is None else ()))
    return tails(file for pattern in patterns for file in folder.glob(pattern))


def tails(files: Iterable[Path]) -> dict[str, str]:
    """Return the ends of the non-empty files by name, at most of the FILES_MAX written last."""
    sizes = [(file.stat().st_mtime, file) for file in files if file.stat().st_size]
    newest = [file for _, file in sorted(sizes, reverse=True)[:FILES_MAX]]
    return {file.name: _tail(file) for file in sorted(newest)}


def _tail(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return without_secrets(opened.read(TAIL_BYTES).decode(errors="replace"))
