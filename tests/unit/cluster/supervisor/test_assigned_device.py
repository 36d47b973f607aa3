"""The device of an actor, by what Ray has reserved for it and what it lets the process see."""

import pytest

from tidemill.cluster.supervisor.worker_actor import assigned_device


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
