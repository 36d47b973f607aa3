"""The device of an actor, by what Ray has reserved for it and what it lets the process see, and its nodes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.processes.worker_actor import (
    actor_options,
    assigned_device,
    network_of,
    on_reserved_nodes,
)
from tidemill.cluster.settings import WorkerSettings
from tidemill.workers.parallel.network import Network
from tidemill.workers.settings import EngineSettings


@pytest.mark.parametrize(
    ("device", "gpu_ids", "visible", "wanted"),
    [
        ("cpu", [], None, "cpu"),
        ("cuda", ["3"], ["3"], "cuda:0"),  # Ray hides the others
        ("cuda", ["3"], None, "cuda:3"),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
        ("cuda", ["6"], ["4", "5", "6"], "cuda:2"),  # ... on a node that was started with some of them
        ("cuda", ["GPU-b"], ["GPU-a", "GPU-b"], "cuda:1"),
        ("cuda", [], None, "cuda"),  # without a reservation
        ("cuda:1", [], None, "cuda:1"),
    ],
)
def test_device_of_an_actor(device: str, gpu_ids: list[str], visible: list[str] | None, wanted: str) -> None:
    assert assigned_device(device, gpu_ids, visible) == wanted


GROUP = EngineSettings(
    model_folder=Path("none"),
    store_url="memory:",
    cache_folder=Path("none"),
    tensor_parallel_size=4,
    tensor_parallel_nodes=2,
)
TLS = MutualTls(certificate=Path("c"), key=Path("k"), ca=Path("a"))
WORKER = WorkerSettings(name="decode-0", role="decode", engine=GROUP, host=None, tls=TLS)


def bundles(worker: WorkerSettings) -> list[int]:
    """Return the bundle of each rank."""
    options = [actor_options(worker, None, index) for index in range(4)]
    return [option["scheduling_strategy"].placement_group_bundle_index for option in options]


def test_ranks_have_the_bundles_that_the_supervisor_reserved() -> None:
    assert bundles(WORKER) == [0, 0, 1, 1]
    assert bundles(replace(WORKER, engine=replace(GROUP, tensor_parallel_nodes=1))) == [0, 1, 2, 3]


def test_ranks_over_nodes_that_found_room_on_one_meet_as_on_one_node() -> None:
    apart = on_reserved_nodes(GROUP, ["a", "b"])
    assert network_of(WORKER, apart, "10.0.0.4") == Network(host="10.0.0.4", certificates=TLS)
    together = on_reserved_nodes(GROUP, ["a", "a"])
    assert (together.tensor_parallel_nodes, together.backend) == (1, "shared-memory")
    assert network_of(WORKER, together, "10.0.0.4") is None
