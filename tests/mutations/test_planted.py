"""The planted bugs fit the code, and forks run tests; whether tests catch bugs is `make mutations`."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.mutations.__main__ import FULL_RUN, changed
from tests.mutations.bugs import PLANTED
from tests.mutations.forks import Forks
from tests.mutations.planted import Planted, read
from tests.tidy.tree import LAYERS

ROOT = Path(__file__).parents[2]


@cache
def known_names() -> set[str]:
    files = [path for layer in LAYERS for path in (ROOT / layer).rglob("*") if path.suffix in {".py", ".cpp"}]
    return {name for path in files for name in re.findall(r"[A-Za-z_]\w*", path.read_text())}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.bug)
def test_planted_bug_fits_the_code(planted: Planted) -> None:
    text = (ROOT / planted.path).read_text()
    with_bug = planted.plant(text)
    assert with_bug != text
    if planted.path.endswith(".py"):
        compile(with_bug, planted.path, "exec")
    assert planted.literal_names() <= known_names(), "the bug uses a name that the product does not have"
    assert all((ROOT / test.partition("::")[0]).is_file() for test in planted.tests.split())


def test_planted_bugs_have_unique_names() -> None:
    assert len({planted.bug for planted in PLANTED}) == len(PLANTED)


def test_plant_follows_renames_and_keeps_white_space() -> None:
    text = "class A:\n    def go(self):\n        return max(self.x,\n            self.y)\n"
    bug = Planted("", "a.py::A.go", "max(self.$X, self.$Y)", "self.$Y", "")
    assert bug.plant(text) == "class A:\n    def go(self):\n        return self.y\n"


def test_plant_refuses_patterns_without_exactly_one_match() -> None:
    text = "def go(a, b):\n    return a + b + a\n"
    for find in ("$A + $B + $A", "a"):
        bug = Planted("twice", "a.py::go", find, "0", "")
        if find == "a":
            with pytest.raises(ValueError, match="matches 3 times"):
                bug.plant(text)
        else:
            assert bug.plant(text) == "def go(a, b):\n    return 0\n"
    with pytest.raises(ValueError, match="there is no come"):
        Planted("never", "a.py::come", "a", "0", "").plant(text)


def test_changed_bugs_are_those_of_changed_files_and_tests(tmp_path: Path) -> None:
    def git(*arguments: str) -> bytes:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout

    names = ("old", "other", "new")
    text = "".join(f"# {name}\n@@ {name}.py::go @@ test_{name}.py\n-1\n+2\n" for name in names)
    bugs = [_, other, new] = list(read(text))
    for name in ("old.py", "other.py", "test_other.py", "tests/mutations/bugs/edge.diff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    assert changed(bugs, tmp_path) == bugs  # there was no full run
    (tmp_path / FULL_RUN).write_text("0" * 40)
    assert changed(bugs, tmp_path) == bugs, "the clone lacks the commit of the full run"
    (tmp_path / FULL_RUN).write_bytes(git("rev-parse", "HEAD"))
    assert changed(bugs, tmp_path) == []
    (tmp_path / "new.py").touch()
    (tmp_path / "test_other.py").write_text("after\n")
    assert changed(bugs, tmp_path) == [other, new]
    git("commit", "-am", "after")
    (tmp_path / FULL_RUN).write_bytes(git("rev-parse", "HEAD"))
    assert changed(bugs, tmp_path) == [new]
    (again,) = read(text.partition("# other")[0].replace("+2", "+3"))
    assert changed([again, other], tmp_path) == [again]


def test_forks_run_what_pytest_would(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("VALUE = 1")
    (tmp_path / "test_it.py").write_text(
        "import time\nfrom other import VALUE\n\n"
        "def test_value(): assert VALUE == 1\n\n"
        "def test_hangs(): time.sleep(300)\n"
    )
    forks, environ = Forks(tmp_path / "output"), dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    options = ["-q", "-p", "no:cacheprovider"]
    try:
        good = forks.pytest([*options, "-k", "value"], tmp_path, environ, 300)
        assert (good.returncode, "1 passed" in good.stdout) == (0, True)
        (tmp_path / "other.py").write_text("VALUE = 2")
        bad = forks.pytest([*options, "-k", "value"], tmp_path, environ, None)
        assert (bad.returncode, "assert 2 == 1" in bad.stdout) == (1, True)
        with pytest.raises(subprocess.TimeoutExpired):
            forks.pytest([*options, "-k", "hangs"], tmp_path, environ, 1)
    finally:
        forks.close()
