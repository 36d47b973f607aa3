"""Settings that Ray has kept for a restart, which another version restores."""

import pickle
from dataclasses import is_dataclass
from types import ModuleType
from typing import cast

import pytest

from tests.unit.cluster.processes.scaling.test_scaler import fleet
from tidemill.cluster import settings as cluster_settings
from tidemill.cluster.settings import ClusterSettings, RouterSettings
from tidemill.workers import settings as worker_settings
from tidemill.workers.pickled_by_name import PickledByName, restore

KEPT = {
    "router": RouterSettings(name="r", replicas=2, ports=(1, 2)),
    "cluster": ClusterSettings(fleets=(fleet(),), namespace="space"),
    "worker": fleet().workers[0],
    "engine": fleet().workers[0].engine,
}


@pytest.mark.parametrize("settings", KEPT.values(), ids=KEPT)
def test_fields_are_restored_by_name(settings: PickledByName) -> None:
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301 - its own


def test_fields_of_another_version_get_their_default_or_are_left_out() -> None:
    _, (_, kept) = KEPT["router"].__reduce__()
    values = cast("dict[str, object]", kept)
    del values["join_port"]
    assert restore(RouterSettings, {**values, "of_tomorrow": 7}) == KEPT["router"]


@pytest.mark.parametrize("module", [cluster_settings, worker_settings])
def test_every_class_of_settings_is_pickled_so(module: ModuleType) -> None:
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)]
    own = [kind for kind in classes if kind.__module__ == module.__name__]
    assert own
    assert all(issubclass(kind, PickledByName) for kind in own)
