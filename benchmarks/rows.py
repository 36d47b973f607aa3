"""Files of results: JSON lines, the first of which names what made the others."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.cpu import cpu_name

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]

VIRTUAL = "virtual time"
"""The CPU of results that do not depend on one."""


def read_rows(name: str, folder: Path = RESULTS) -> list[Row]:
    """Return the rows of a file of results, without its first line. There are none without a file."""
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()[1:]] if file.exists() else []


def write_rows(
    name: str, command: str, rows: Iterable[Row], folder: Path = RESULTS, cpu: str | None = None
) -> None:
    """Write rows behind a line with their command, CPU and day. `cpu` is given if it is not
    this one: VIRTUAL, or empty if each row names its own."""
    cpu = cpu_name() if cpu is None else cpu
    about = {"command": command, "cpu": cpu, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in (about, *map(rounded, rows))]
    (folder / f"{name}.jsonl").write_text("".join(lines))


def rounded(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Round floats to four digits."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case list():
            return [rounded(each) for each in value]
        case _:
            return value
