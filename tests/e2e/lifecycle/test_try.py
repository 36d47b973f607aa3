"""`deploy/try.sh` with a real server. helm and kubectl are pretended; their `delete pod` kills a worker."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tests.support.e2e.server import EVENTUALLY_S_MAX, Server, eventually

ROOT = Path(__file__).parents[3]

PRETENDED = """#!{python}
import os, sys, time
line = " ".join(sys.argv[1:])
with open({calls!r}, "a") as calls:
    print(line, file=calls)
if "component=worker" in line:
    os.kill({victim}, 9)
if "port-forward" in line:
    time.sleep(3600)
if line.endswith("get pods -o name") and {left!r}:
    print({left!r})
"""


def run_script(server: Server, folder: Path, victim: int, left: str) -> tuple[int, list[str], str]:
    """Return its exit status, its table, and the calls of helm and kubectl. `left` is a pod that remains."""
    calls = folder / "calls"
    for name in ("helm", "kubectl"):
        program = folder / name
        program.write_text(
            PRETENDED.format(python=sys.executable, calls=str(calls), victim=victim, left=left)
        )
        program.chmod(0o755)
    ended = subprocess.run(
        [ROOT / "deploy/try.sh"],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * EVENTUALLY_S_MAX,
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "TRY_PORT": str(httpx.URL(server.url).port),
            "TRY_WAIT_S": str(EVENTUALLY_S_MAX),
        },
    )
    return ended.returncode, ended.stdout.rpartition("\n\n")[2].splitlines(), calls.read_text()


def is_of(process: psutil.Process, folder: Path) -> bool:
    """Return whether it is the pretended helm or kubectl of that folder."""
    try:
        return {str(folder / "helm"), str(folder / "kubectl")} & set(process.cmdline()) != set()
    except psutil.Error:
        return False


def test_script_asks_kills_and_judges(server: Server, tmp_path: Path) -> None:
    """Every step passes but the last one, for which a pod remains."""
    [victim, *_] = server.workers("decode")
    before = len(server.workers())
    status, table, calls = run_script(server, tmp_path, victim["info"]["pid"], "pod/left")
    failed = [row.rsplit(maxsplit=1)[0] for row in table if row.endswith("FAILED")]
    assert failed == ["uninstall: no pod is left"]
    assert status == 1
    assert len(table) == 20
    for line in ("install try deploy/helm/tidemill", "component=frontend", "uninstall try"):
        assert line in calls
    eventually(lambda: len(server.workers()) == before)
    workers = {row["info"]["pid"] for row in server.workers()}
    assert victim["info"]["pid"] not in workers, "the script's kill was a kill"
    eventually(lambda: not [process for process in psutil.process_iter() if is_of(process, tmp_path)])
