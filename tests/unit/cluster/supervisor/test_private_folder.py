"""A folder is private, ends with its process, and the next process removes what a killed one has left."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.cluster.supervisor.private_folder import LOCK, private_folder

PREFIX = "tidemill-"
HOLD = """
import sys
from pathlib import Path
from tidemill.cluster.supervisor.private_folder import private_folder
with private_folder(sys.argv[1], Path(sys.argv[2])) as files:
    print(files, flush=True)
    sys.stdin.read()
"""


def test_folder_is_private_whatever_happens_to_its_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with private_folder(PREFIX, tmp_path) as files:
            files.chmod(0o777)  # as Ray does
            (files / "a").touch()
            assert files.parent.parent == tmp_path
            assert files.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert not list(tmp_path.iterdir())


def test_folder_of_a_killed_process_is_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, PREFIX, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders: list[Path] = []
    for holder in holders:
        assert holder.stdout is not None
        folders.append(Path(holder.stdout.readline().strip()))
    killed, running = folders
    try:
        holders[0].kill()
        holders[0].wait()
        assert killed.exists()
        with private_folder(PREFIX, tmp_path):
            assert not killed.parent.exists()
            assert running.exists()
    finally:
        for holder in holders:
            holder.communicate()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["results1", "store-abcdefgh", "ABCDEFGH", "abcdefgh2"])
def test_folder_of_another_name_stays(name: str, tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}{name}"
    other.mkdir()
    if name != "results1":  # which could be ours, but has no lock
        (other / LOCK).touch()
    with private_folder(PREFIX, tmp_path):
        assert other.exists()


def test_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / LOCK).touch()
    (tmp_path / f"{PREFIX}abcdefgh").symlink_to(target)
    (tmp_path / f"{PREFIX}12345678").mkdir()
    (tmp_path / f"{PREFIX}12345678" / LOCK).symlink_to(target / LOCK)
    with private_folder(PREFIX, tmp_path):
        assert (target / LOCK).exists()
        assert (tmp_path / f"{PREFIX}12345678").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
@pytest.mark.parametrize("given", ["", LOCK])
def test_folder_of_another_user_stays(given: str, tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}abcdefgh"
    other.mkdir()
    (other / LOCK).touch()
    os.chown(other / given, 12345, 12345)
    with private_folder(PREFIX, tmp_path):
        assert other.exists()


def test_folder_that_is_taken_for_abandoned_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[Path] = []

    def remove_first(lock: int, operation: int) -> None:
        flock(lock, operation)
        if not removed:
            (path,) = tmp_path.iterdir()
            (path / LOCK).unlink()
            path.rmdir()
            removed.append(path)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with private_folder(PREFIX, tmp_path) as files:
        assert files.exists()
        assert files.parent not in removed
