"""A cluster that is stopped while it starts leaves nothing."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

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

original = ray._private.worker.connect

signal.signal(signal.SIGTERM, interrupt)
if len(sys.argv) > 2:
    ray._private.worker.connect = connect
workers = (worker("prefill-0", "prefill"), worker("decode-0", "decode"))
try:
    settings = ClusterSettings(fleets=(FleetSettings(workers=workers),), temp_folder=Path(sys.argv[1]))
    start_cluster(settings, Console(stderr=True))
    print("ready", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def drive(folder: str, *moment: str) -> "subprocess.Popen[str]":
    """Start a cluster in a process, which sends itself SIGTERM while Ray connects if there is a `moment`."""
    environ = {**os.environ, **ray_environ(joins=False, token=secrets.token_hex(16))}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, folder, *moment],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": os.pathsep.join(sys.path), MARK: folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def folder() -> str:
    return tempfile.mkdtemp(prefix="run-")


def test_signal_while_ray_starts_stops_everything(folder: str) -> None:
    """One that comes later is in tests/support/e2e/server.py."""
    with drive(folder) as driver:
        started = psutil.Process(driver.pid)
        while not started.children():
            assert driver.poll() is None
        driver.send_signal(signal.SIGTERM)
        stdout, _ = driver.communicate()
    assert stdout.strip() == "interrupted"
    assert driver.returncode == 0
    assert marked(folder) == []
    Path(folder).rmdir()


def test_signal_while_ray_connects_stops_everything(folder: str) -> None:
    """Ray has its own handler of signals by then, and ends a process that leaves in the middle by SIGSEGV."""
    with drive(folder, "connects") as driver:
        stdout, stderr = driver.communicate()
    assert (stdout.strip(), driver.returncode) == ("interrupted", 0), stderr
    assert marked(folder) == []
    Path(folder).rmdir()
