"""Settings that Ray has kept for a restart, pickled by an earlier version without the last field."""

from typing import Any, cast

import pytest

from tests.unit.cluster.supervisor.test_journal import fleet
from tidemill.cluster.settings import ClusterSettings, RouterSettings


@pytest.mark.parametrize(
    ("settings", "new"),
    [
        (RouterSettings(name="r", replicas=2, ports=(1, 2)), "join_port"),
        (ClusterSettings(fleets=(fleet(),), namespace="space"), "authority_key"),
    ],
)
def test_new_fields_have_their_defaults(settings: RouterSettings | ClusterSettings, new: str) -> None:
    pickled = cast("Any", settings)
    restored = object.__new__(type(settings))
    cast("Any", restored).__setstate__(pickled.__getstate__()[:-1])
    assert restored == settings
    assert getattr(restored, new) is None
