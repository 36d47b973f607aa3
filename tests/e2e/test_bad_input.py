"""Wrong start-up arguments in a real process give one line, exit status 2, and leave nothing
running.

Mistakes that are found before anything starts are tested in tests/unit/cluster/cli/test_main.py.
"""

from pathlib import Path

import pytest

from tests.support.e2e.server import run_cli


def refused(*arguments: str, **environment: str) -> str:
    """The one line that the command is refused with, beside warnings of what it had started."""
    ended, left = run_cli(*arguments, **environment)
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if " WARNING " not in line]
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("tidemill: ")
    assert not left, f"processes outlive the command: {left}"
    return lines[0]


def test_mistake_found_before_start() -> None:
    assert "/nowhere" in refused("serve", "/nowhere")


@pytest.mark.slow
def test_mistake_found_in_a_worker(tmp_path: Path) -> None:
    """The compiler is looked for by the workers: their error comes back as a line of the command."""
    line = refused(
        "serve", "keeper", "--port", "0", "--mixed", "1", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)
    )
    assert "g++" in line
    assert "--kernels reference" in line
