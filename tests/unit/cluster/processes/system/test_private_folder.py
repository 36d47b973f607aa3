"""A folder is private and ends with its process, or the next one removes it; ends of children are seen."""

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.e2e.server import eventually, runs
from tidemill.cluster.processes.system.children import end, has_ended
from tidemill.cluster.processes.system.private_folder import (
    FILES,
    LOCK,
    DetachedServer,
    detached_servers,
    lasting_folder,
    private_folder,
    remove_abandoned,
)

PREFIX = "tidemill-"
HOLD = """
import sys
from pathlib import Path
from tidemill.cluster.processes.system.private_folder import private_folder
with private_folder(sys.argv[1], Path(sys.argv[2])) as files:
    print(files, flush=True)
    sys.stdin.read()
"""
OPEN = """
import sys
opened = open(sys.argv[1], sys.argv[2])
print(flush=True)
sys.stdin.read()
"""
REAPED = """
import sys
from pathlib import Path
from tidemill.cluster.processes.system.private_folder import private_folder
from tidemill.cluster.processes.system.reaper import reaping
import psutil
with reaping([Path(sys.argv[2])]), private_folder(sys.argv[1], Path(sys.argv[2])) as files:
    print(files, psutil.Process().children()[0].pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def started(script: str, *arguments: object) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Run a script until the end of its input, and yield it with its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.communicate()


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
    with pytest.raises(KeyboardInterrupt), lasting_folder(PREFIX, tmp_path):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_folder_of_a_killed_process_is_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    with started(HOLD, PREFIX, tmp_path) as (holder, killed), started(HOLD, PREFIX, tmp_path) as (_, running):
        holder.kill()
        holder.wait()
        assert Path(killed).exists()
        with private_folder(PREFIX, tmp_path):
            assert not Path(killed).parent.exists()
            assert Path(running).exists()
    assert not list(tmp_path.iterdir())


def test_processes_that_write_to_an_abandoned_folder_end_with_it(tmp_path: Path) -> None:
    """A process that only reads there, like `tail -f` of a log, goes on."""
    folder = tmp_path / f"{PREFIX}abcdefgh"
    log = folder / FILES / "log"
    log.parent.mkdir(parents=True)
    (folder / LOCK).touch()
    log.write_bytes(bytes(10_000))
    with started(OPEN, log, "a") as (writer, _), started(OPEN, log, "r") as (reader, _):
        for dry_run in (True, False):
            assert folder.exists()
            assert writer.poll() is None
            (left,) = remove_abandoned([tmp_path], dry_run=dry_run)
            assert left.folder == folder
            assert left.num_bytes >= 10_000
            assert [process.pid for process in left.processes] == [writer.pid]
        assert not folder.exists()
        assert not psutil.pid_exists(writer.pid)
        assert reader.poll() is None
    assert remove_abandoned([tmp_path]) == []


def test_folder_with_a_file_that_appears_meanwhile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / f"{PREFIX}abcdefgh" / FILES
    files.mkdir(parents=True)
    (files.parent / LOCK).touch()
    rmtree, removed = shutil.rmtree, list[Path]()

    def remove(path: Path, *, ignore_errors: bool) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        if not removed:
            path.mkdir(parents=True)
        assert (files.parent / LOCK).exists() or path == files.parent
        removed.append(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    remove_abandoned([tmp_path])
    assert removed == [files, files, files.parent]
    assert not files.parent.exists()


def test_reaper_removes_the_folder_of_a_killed_process(tmp_path: Path) -> None:
    """It ignores the signals that end the process."""
    with started(REAPED, PREFIX, tmp_path) as (holder, line):
        files, reaper = line.split()
        process = psutil.Process(int(reaper))
        eventually(lambda: ignores(process.pid, signal.SIGTERM))
        process.terminate()
        assert Path(files).exists()
        assert runs(process)
        holder.kill()
    eventually(lambda: not runs(process))
    assert not list(tmp_path.iterdir())


def ignores(pid: int, number: signal.Signals) -> bool:
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
    return bool(int(mask.split()[1], 16) & 1 << (number - 1))


@pytest.mark.parametrize("name", ["results1", "other-abcdefgh", "ABCDEFGH", "abcdefgh2", "", LOCK])
def test_folders_of_other_names_and_users_stay(name: str, tmp_path: Path) -> None:
    is_of_another_user = name in {"", LOCK}
    other = tmp_path / f"{PREFIX}{'abcdefgh' if is_of_another_user else name}"
    other.mkdir()
    if name != "results1":  # which could be ours, but has no lock
        (other / LOCK).touch()
    if is_of_another_user:
        if os.geteuid() != 0:
            pytest.skip("only root may give a file to another user")
        os.chown(other / name, 12345, 12345)
    with private_folder(PREFIX, tmp_path):
        assert other.exists()


def test_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    target, linked = tmp_path / "target", tmp_path / f"{PREFIX}12345678"
    for folder in (target, linked):
        folder.mkdir()
    (target / LOCK).touch()
    (tmp_path / f"{PREFIX}abcdefgh").symlink_to(target)
    (linked / LOCK).symlink_to(target / LOCK)
    with private_folder(PREFIX, tmp_path):
        assert (target / LOCK).exists()
        assert linked.exists()


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


def test_folder_of_a_detached_server_is_kept_while_a_raylet_writes_there(tmp_path: Path) -> None:
    """No process writes to the folder of its store, which is kept as well."""
    parents = [tmp_path / "temp", tmp_path / "shm"]
    for parent in parents:
        parent.mkdir()
    raylet = tmp_path / "raylet"
    shutil.copy("/bin/sleep", raylet)
    with (
        lasting_folder("tidemill-", parents[0]) as root,
        lasting_folder("tidemill-store-", parents[1]) as store,
    ):
        server = DetachedServer(url="http://a:1", root=str(root), store=str(store), cwd="/", open_s_max=5.0)
        for folder in (root, store):
            server.write(str(folder))
        assert not remove_abandoned(parents), "they are locked while the server starts"
        with (root / FILES / "log").open("w") as log:
            process = subprocess.Popen([raylet, "600"], stdout=log)
    try:
        eventually(lambda: psutil.Process(process.pid).name() == "raylet")
        assert not remove_abandoned(parents)
        assert detached_servers(parents[0]) == [server]
        assert detached_servers(parents[1]) == [], "the store is no server"
        assert server.is_running()
    finally:
        process.kill()
        process.wait()
    assert [left.folder for left in remove_abandoned(parents)] == [root, store]
    assert not detached_servers(parents[0])


def test_end_of_a_child_is_seen_before_and_after_its_status_is_read() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    try:
        assert not has_ended(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)
        assert child.wait() == -signal.SIGKILL, "its status was read in place of its owner"
    finally:
        child.communicate()
    assert has_ended(process)


def test_end_of_a_child_is_seen_without_file_descriptors() -> None:
    """The watch of a server must not end it when it has no descriptors left."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        while not has_ended(process):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    child.wait()


def test_processes_are_ended_although_one_ends_while_psutil_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux then answers pidfd_open with ENOENT, which psutil 7.2 does not expect."""
    errors, really = [FileNotFoundError()], os.pidfd_open

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if errors:
            raise errors.pop()
        return really(pid, flags)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        psutil.wait_procs([psutil.Process(child.pid)], timeout=0.0)  # it tries pidfd_open once
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        end([psutil.Process(child.pid)], 0.1)
        assert not errors
        assert not psutil.pid_exists(child.pid)
