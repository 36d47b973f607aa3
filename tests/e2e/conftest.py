"""One Ray cluster for the tests of this folder that need one: two workers without models."""

from collections.abc import Generator
from io import StringIO

import psutil
import pytest
from rich.console import Console

from tests.support.e2e.fake_engine import worker
from tests.support.e2e.server import EVENTUALLY_S_MAX, command_of
from tidemill.cluster.settings import ClusterSettings, FleetSettings, RouterSettings
from tidemill.cluster.supervisor.launch import Cluster, start_cluster


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
    assert any("ray::WorkerActor" in command_of(process) for process in started)
    try:
        yield cluster
    finally:
        cluster.stop()
    _, alive = psutil.wait_procs(started, timeout=EVENTUALLY_S_MAX)
    assert not alive, "stop leaves no process behind"
    later = set(psutil.Process().children()) - before
    assert not [line for process in later if (line := command_of(process)) and "multiprocessing" not in line]
