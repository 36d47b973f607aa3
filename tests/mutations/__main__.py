"""Plant each bug in a copy of the repository and report whether the tests catch it.

    python -m tests.mutations [--jobs N] [--after-tests] [--changed] [part of a bug's name or file ...]

Exit status 1 when a bug survives, or when the tests fail without any bug, which is not checked with
`--after-tests`. A run that catches all bugs writes its commit to `bugs/full_run`. With `--changed`, only bugs
are planted of which something differs from that commit: their file, a test that catches them, or they
themselves. If the repository lacks the commit, all are planted.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.bugs import PLANTED
from tests.mutations.forks import Forks
from tests.mutations.planted import Planted, read

ROOT = Path(__file__).parents[2]
NOT_COPIED = ("__pycache__", ".*", "dist", "build")
KERNELS = "kernels"
SIM_RUNS = 100
TIMEOUT_S = 180.0
"""A bug may cause an endless loop: a timeout counts as caught."""
WAIT_S_MAX = 10.0
"""Seconds that a test waits at most (tests/support/waits.py)."""
FULL_RUN = "tests/mutations/bugs/full_run"
"""The file with the last commit whose tests have caught all planted bugs. Clones may lack tags."""
ATTEMPTS = 3
"""A test with random cases may miss a bug in one run; a bug survives if it is missed in all of these."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="bugs tested concurrently")
    parser.add_argument("--after-tests", action="store_true", help="all tests have just passed without a bug")
    parser.add_argument("--changed", action="store_true", help="what changed since the last full run alone")
    parser.add_argument("words", nargs="*", help="parts of a bug's name or file; without any: all bugs")
    options = parser.parse_args(arguments)
    words: list[str] = options.words
    named = [bug for bug in PLANTED if not words or any(word in f"{bug.bug} {bug.where}" for word in words)]
    if options.changed:
        named = changed(named)
    here = set(Path("/proc/cpuinfo").read_text().split())
    chosen = [bug for bug in named if not bug.cpu or bug.cpu in here]
    for bug in named:
        if bug not in chosen:
            print(f"left out, needs {bug.cpu}: {bug.bug}")  # noqa: T201  the answer
    with _copies(options.jobs) as copies:
        tests = sorted({test for bug in chosen for test in bug.tests.split() if not options.after_tests})
        interpreted = [test for test in tests if test.startswith("tests/triton")]
        for some in (interpreted, sorted({*tests} - {*interpreted})):
            together = ["-n", str(options.jobs), "--dist", "loadfile"]
            if some and (failure := _failure(copies[0], some, None, together=together)):
                print(f"{failure}\nthe tests fail without any bug: see `make test`")  # noqa: T201  the answer
                return 1
        survivors = [bug for bug, caught in zip(chosen, _run(chosen, copies), strict=True) if not caught]
    if not survivors and named == list(PLANTED):
        (ROOT / FULL_RUN).write_text(_git(ROOT, "rev-parse", "HEAD"))
    lines = [f"SURVIVED {bug.where}: {bug.bug}" for bug in survivors]
    print(*lines, f"{len(chosen) - len(survivors)} of {len(chosen)} caught", sep="\n")  # noqa: T201  the answer
    return 1 if survivors else 0


def changed(bugs: list[Planted], root: Path = ROOT) -> list[Planted]:
    """Return the bugs of which something differs from the last full run; without such a run, all."""
    file = root / FULL_RUN
    commit = file.read_text().strip() if file.exists() else ""
    if not commit or not _git(
        root, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}", may_fail=True
    ):
        return bugs
    files = {
        *_git(root, "diff", "--name-only", commit).split(),
        *_git(root, "ls-files", "-o", "--exclude-standard").split(),
    }
    if any(file.startswith("tests/mutations/") and file.count("/") == 2 for file in files):
        return bugs
    listed = _git(root, "ls-tree", "--name-only", commit, "tests/mutations/bugs/").split()
    texts = [_git(root, "show", f"{commit}:{name}") for name in listed if name.endswith(".diff")]
    planted = {bug for text in texts for bug in read(text)}
    return [
        bug
        for bug in bugs
        if bug not in planted
        or files.intersection([bug.path, *(test.partition("::")[0] for test in bug.tests.split())])
    ]


def _git(root: Path, *arguments: str, may_fail: bool = False) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=not may_fail).stdout


def _run(bugs: Iterable[Planted], copies: Sequence[Path]) -> list[bool]:
    pairs = [(copy, Forks(copy.with_name(f"{copy.name}-output"))) for copy in copies]
    idle = SimpleQueue[tuple[Path, Forks]]()
    for pair in pairs:
        idle.put(pair)

    def caught(bug: Planted) -> bool:
        copy, forks = idle.get()
        try:
            return _is_caught(copy, bug, forks)
        finally:
            idle.put((copy, forks))

    try:
        with ThreadPoolExecutor(len(copies)) as threads:
            return list(threads.map(caught, bugs))
    finally:
        for _, forks in pairs:
            forks.close()


def _is_caught(copy: Path, planted: Planted, forks: Forks) -> bool:
    path = copy / planted.path
    text = path.read_text()
    started_s = time.monotonic()
    path.write_text(planted.plant(text))
    try:
        attempts = range(1, ATTEMPTS + 1)
        found = next((n for n in attempts if _failure(copy, planted.tests.split(), TIMEOUT_S, forks)), None)
    finally:
        path.write_text(text)
    took_s = time.monotonic() - started_s
    verdict = {None: "SURVIVED", 1: "caught  "}.get(found, f"caught in attempt {found}")
    print(f"{verdict} {took_s:5.1f} s  {planted.where}: {planted.bug}", flush=True)  # noqa: T201  the answer
    return found is not None


def _failure(
    copy: Path,
    tests: Collection[str],
    timeout_s: float | None,
    forks: Forks | None = None,
    together: Collection[str] = (),
) -> str:
    """Return the last lines of the output of tests that fail, and "" if they pass. `together` are options
    for several processes of pytest. Those of Triton's interpreter run in none of `forks`: it is chosen when
    Triton is imported."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutations.no_shrinking"]
    arguments = [*options, *together, *tests]
    paths = f"{copy}/src:{copy}"  # also for processes that the tests start
    environment = os.environ | {"SIM_RUNS": str(SIM_RUNS), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    environment["TEST_WAIT_S_MAX"] = str(WAIT_S_MAX)
    environment["KERNEL_CACHE"] = str(copy.parent / KERNELS)  # named by their sources
    if all(test.startswith("tests/triton") for test in tests):
        environment["TRITON_INTERPRET"] = "1"
        forks = None
    try:
        if forks is not None:
            done = forks.pytest(arguments, copy, environment, timeout_s)
        else:
            done = subprocess.run(
                [sys.executable, "-B", "-m", "pytest", *arguments],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:g} s"
    crashed = done.returncode < 0 and done.returncode != -signal.SIGKILL  # the kernel's, short of memory
    has_failed = "short test summary info" in done.stdout  # what is left of its coroutines may break the end
    assert crashed or has_failed or done.returncode in {0, 1, 2}, done.stdout + done.stderr
    return done.stdout[-2000:] if done.returncode else ""


@contextmanager
def _copies(count: int) -> Generator[list[Path]]:
    leave = shutil.ignore_patterns(*NOT_COPIED)
    with tempfile.TemporaryDirectory(prefix="tidemill-mutations-") as folder:
        made = os.environ.get("KERNEL_CACHE", "")
        if made and Path(made).is_dir():
            shutil.copytree(made, Path(folder) / KERNELS, ignore=shutil.ignore_patterns("tmp*"))
        copies = [Path(folder) / str(number) for number in range(count)]
        for copy in copies:
            shutil.copytree(ROOT, copy, symlinks=True, ignore=leave)
        yield copies


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
