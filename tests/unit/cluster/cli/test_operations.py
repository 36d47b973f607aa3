"""The metrics that docs/operations.md names exist."""

import re
from pathlib import Path

from tidemill.cluster.metrics.reference import reference

ROOT = Path(__file__).parents[4]


def test_operations_page_names_existing_metrics() -> None:
    names = set(re.findall(r"`(tidemill:[a-z0-9_]+)", (ROOT / "docs" / "operations.md").read_text()))
    assert len(names) > 15
    assert not [name for name in names if f"| `{name}`" not in reference()]
