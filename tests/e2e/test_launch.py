"""A cluster that is stopped while Ray connects leaves nothing. Other moments: machine/test_starts.py."""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.e2e.server import MARK, marked
from tidemill.cluster.settings import ray_environ

ROOT = Path(__file__).parents[2]

DRIVER = """
import os, signal, sys
from pathlib import Path
from threading import Timer
import ray._private.worker
from rich.console import Console
from tests.support.cluster.fake_engine import worker
from tidemill.cluster.processes.launch import start_cluster
from tidemill.cluster.settings import ClusterSettings, FleetSettings

def interrupt(*_):
    raise KeyboardInterrupt

def connect(*args, **options):
    Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    original(*args, **options)

original, ray._private.worker.connect = ray._private.worker.connect, connect
signal.signal(signal.SIGTERM, interrupt)
workers = (worker("prefill-0", "prefill"), worker("decode-0", "decode"))
try:
    settings = ClusterSettings(fleets=(FleetSettings(workers=workers),), temp_folder=Path(sys.argv[1]))
    start_cluster(settings, Console(stderr=True))
    print("ready", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_signal_while_ray_connects_stops_everything() -> None:
    """Ray has its own handler of signals by then, and ends a process that leaves in the middle by SIGSEGV."""
    folder = tempfile.mkdtemp(prefix="run-")
    environ = {**os.environ, **ray_environ(joins=False, token=secrets.token_hex(16))}
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, folder],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": os.pathsep.join(sys.path), MARK: folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout.strip(), ended.returncode) == ("interrupted", 0), ended.stderr
    assert marked(folder) == []
    Path(folder).rmdir()
