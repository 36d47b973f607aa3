"""Plants each bug in a copy of the repository and says whether the tests notice.

    python -m tests.mutations [part of a bug's name or file ...]

Exit status 1 when one survives, or when the tests fail without any.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.mutations.catalog import PLANTED
from tests.mutations.planted import Planted

ROOT = Path(__file__).parents[2]
FOLDERS = ("cluster", "workers", "kvstore", "kernels", "src", "tests", "benchmarks", "deploy")
SIM_RUNS = 100
HANG_S = 300.0
"""A bug may be an endless loop: that is noticed, too."""


def main(words: list[str]) -> int:
    chosen = [one for one in PLANTED if not words or any(word in one.bug + one.file for word in words)]
    with tempfile.TemporaryDirectory(prefix="tidemill-mutations-") as folder:
        copy = Path(folder)
        _copy_repository(copy)
        if not _passes(copy, _all_tests(chosen)):
            print("the tests fail without any bug: see `make test`")  # noqa: T201  the answer
            return 1
        survivors = [one for one in chosen if not _is_caught(copy, one)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")  # noqa: T201  the answer
    return 1 if survivors else 0


def _is_caught(copy: Path, planted: Planted) -> bool:
    path = copy / planted.file
    text = path.read_text()
    assert text.count(planted.old) == 1, f"{planted.file} has changed: write {planted.bug!r} anew"
    started_s = time.monotonic()
    path.write_text(text.replace(planted.old, planted.new))
    try:
        caught = not _passes(copy, planted.tests.split())
    finally:
        path.write_text(text)
    took_s = time.monotonic() - started_s
    verdict = "caught  " if caught else "SURVIVED"
    print(f"{verdict} {took_s:5.1f} s  {planted.file}: {planted.bug}", flush=True)  # noqa: T201  the answer
    return caught


def _passes(copy: Path, tests: Iterable[str]) -> bool:
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutations.no_shrinking"]
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    paths = f"{copy}/src:{copy}"  # also for processes that the tests start
    environment = os.environ | {"SIM_RUNS": str(SIM_RUNS), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=HANG_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    assert done.returncode in {0, 1, 2}, done.stdout.decode() + done.stderr.decode()
    return done.returncode == 0


def _copy_repository(copy: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", "*.pyc", "*.safetensors")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", copy)


def _all_tests(chosen: Iterable[Planted]) -> list[str]:
    return sorted({test for one in chosen for test in one.tests.split()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
