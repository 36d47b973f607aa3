"""One Ray cluster for the tests of this folder that need one: two workers without models."""

import os
import secrets

from tidemill.cluster.settings import ClusterSettings, FleetSettings, RouterSettings, ray_environ

# Ray reads its environment when it is imported
os.environ.update(ray_environ(joins=False, token=secrets.token_hex(16)))

from collections.abc import Generator
from io import StringIO

import psutil
import pytest
from rich.console import Console

from tests.e2e.fake_engine import worker
from tidemill.cluster.launch import Cluster, start_cluster


@pytest.fixture(scope="session")
def fleet() -> FleetSettings:
    return FleetSettings(
        workers=(worker("prefill-0", "prefill"), worker("decode-0", "decode")),
        router=RouterSettings(replicas=2),
    )


@pytest.fixture(scope="session")
def cluster(fleet: FleetSettings) -> Generator[Cluster]:
    settings = ClusterSettings(fleets=(fleet,))
    before = set(psutil.Process().children())
    cluster = start_cluster(settings, Console(file=StringIO()))
    started = set(psutil.Process().children(recursive=True)) - before
    assert any("ray::WorkerActor" in " ".join(process.cmdline()) for process in started)
    try:
        yield cluster
    finally:
        cluster.stop()
    assert not [process for process in started if process.is_running()], "stop leaves no process behind"
    later = set(psutil.Process().children()) - before
    assert not [process for process in later if "multiprocessing" not in " ".join(process.cmdline())]
