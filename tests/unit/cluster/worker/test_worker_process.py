"""The process of a worker: its interpreter disturbs no step, and memory that a step frees stays with it, so
that the next step does not fault its pages in again. Its device is named for the cluster, and its engine has
the roles that it can do."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster.fake_engine import FakeBuilt, FakeEngine
from tests.support.cluster.heartbeats import worker_info
from tidemill.cluster.settings import WorkerSettings
from tidemill.cluster.worker.assignment import Assignment
from tidemill.cluster.worker.worker_process import WorkerProcess, device_of
from tidemill.workers.engine.rank_processes import start_ranks
from tidemill.workers.messages import Ack, EngineInfo
from tidemill.workers.settings import EngineSettings, HostedSettings, SettingsError

ENGINE = EngineSettings(model_folder=Path("none"), store_url="memory:", cache_folder=Path("none"))
DECODES = EngineInfo(roles=("decode",))

INTERPRETER = """
import gc, sys
from tidemill.cluster.worker.worker_process import SWITCH_S, favour_steps
favour_steps()
assert abs(sys.getswitchinterval() - SWITCH_S) < 1e-6
assert gc.isenabled() and gc.get_freeze_count() > 10_000
youngest = gc.get_count()[0]
made = [[] for _ in range(20_000)]
assert gc.get_count()[0] >= youngest + 20_000, "a collection amid some steps"
"""

MALLOC = """
import resource, torch
from tidemill.workers.malloc import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
for _ in range(10):
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(1 << 24)  # 64 MiB: 16,384 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_kept() -> None:
    for keeps in (True, False):
        script = MALLOC.format(keeps=keeps)
        found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        assert (int(found.stdout) < 2000) is keeps


def test_steps_are_not_disturbed() -> None:
    subprocess.run([sys.executable, "-c", INTERPRETER], check=True)


def test_worker_on_several_nodes_shares_its_device_with_no_other() -> None:
    """The broker would lend memory of one node that is freed on another."""
    engine = replace(ENGINE, tensor_parallel_size=2)
    worker = WorkerSettings(name="decode-1", role="decode", engine=engine)
    assert device_of(worker, "10.0.0.4", "cpu") == "10.0.0.4/cpu"
    apart = replace(worker, engine=replace(engine, tensor_parallel_nodes=2))
    assert device_of(apart, "10.0.0.4", "cpu") == "10.0.0.4/cpu/decode-1"


def build_decoder(settings: HostedSettings, progress: object, starts: object) -> FakeBuilt:
    """Build an engine that cannot produce."""
    del settings, progress, starts
    return FakeBuilt(engine=FakeEngine(), info=DECODES)


async def test_engine_gets_no_role_that_it_cannot_do() -> None:
    build = f"{__name__}:build_decoder"
    settings = WorkerSettings(name="prefill-0", role="prefill", engine=ENGINE, build=build)
    process = WorkerProcess(settings, "127.0.0.1", "1", "node", start_ranks)
    with pytest.raises(SettingsError, match="the engine does no prefill work: set the role to decode"):
        await process.run([])
    assignment = Assignment(FakeEngine(), worker_info(roles=DECODES.roles))
    assignment.apply(Ack(role="mixed"))
    assert assignment.info.role == "decode"
