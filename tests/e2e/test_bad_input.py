"""A mistake that only a worker finds gives one line, exit status 2, and leaves nothing running.

Mistakes that are found before anything starts are tested in tests/unit/cluster/cli/test_main.py.
"""

import tempfile
from pathlib import Path

import pytest

from tests.support.e2e.server import run_cli


@pytest.mark.slow
def test_mistake_found_in_a_worker(tmp_path: Path) -> None:
    """The compiler is looked for by the workers: their error comes back as a line of the command."""
    temp_folder = Path(tempfile.mkdtemp(prefix="run-"))  # a short path, for Ray's sockets
    nowhere = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(temp_folder)}
    ended, left = run_cli("serve", "keeper", "--port", "0", "--mixed", "1", **nowhere)
    assert (ended.returncode, ended.stdout, left) == (2, "", [])
    temp_folder.rmdir()  # and so it is empty
    [line] = [line for line in ended.stderr.splitlines() if " WARNING " not in line]
    assert line.startswith("tidemill: ")
    assert "g++" in line
    assert "--kernels reference" in line
