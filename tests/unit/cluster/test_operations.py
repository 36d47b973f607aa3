"""What docs/operations.md tells people to watch exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = "\n".join(
    path.read_text() for folder in ("cluster/http", "workers") for path in (ROOT / folder).glob("*.py")
)


def test_every_metric_of_the_page_is_counted_somewhere() -> None:
    names = set(re.findall(r"`tidemill:([a-z0-9_]+)", (ROOT / "docs" / "operations.md").read_text()))
    assert len(names) > 15
    for name in names - {"worker_memory_bytes"}:  # that one is put together
        counted = name.removesuffix("_total").removeprefix("worker_")
        assert f'"{counted}"' in SOURCES, name
