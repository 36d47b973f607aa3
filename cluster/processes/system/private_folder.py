"""Temporary folders that this user alone may enter and that do not outlive their process for long.

/tmp/tidemill-x7k2w9qa/         mode 0700
  .lock                         locked by the process while it runs, whatever ends it
  files/                        the folder to use; what others make of its mode does not matter

A folder with a free lock is abandoned: its process was killed. Processes that still have a file of
it open for writing are those of the killed server, because all of Ray's write their logs there.

A folder with a record belongs to a detached server. It is abandoned when no raylet writes below the
root that the record names.
"""

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from tidemill.cluster.processes.system.children import end

LOCK = ".lock"
FILES = "files"
RECORD = "server.json"
RAYLET = "raylet"

LONGEST_SOCKET = "/tidemill-xxxxxxxx/files/session_2000-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""The path of a socket of Ray in a private folder below the temporary one."""

SOCKET_PATH_MAX = 107

REMOVALS_MAX = 5
"""A process that was about to start may add a file while its folder is being removed."""

_NAME = re.compile(r"tidemill-(store-)?[a-z0-9_]{8}")


def too_long(temp_folder: Path) -> str:
    """Return why Ray's sockets do not fit below this folder; empty if they do."""
    most = SOCKET_PATH_MAX - len(LONGEST_SOCKET.format(pid=os.getpid()))
    size = len(os.fsencode(temp_folder))
    if size <= most:
        return ""
    return f"the path {temp_folder} has {size} bytes, Ray's sockets leave {most}: set TMPDIR=/tmp"


class Abandoned(NamedTuple):
    """A folder whose process was killed, and what that process has left with it."""

    folder: Path
    num_bytes: int
    processes: list[psutil.Process]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedServer:
    """A server that outlives the command that started it, as its folders record it."""

    url: str
    root: str  # its folder
    store: str  # the folder of its store, if that is a private one
    cwd: str  # for paths in its configuration
    open_s_max: float  # that open answers may go on for at its end

    def write(self, folder: str) -> None:
        Path(folder, RECORD).write_text(json.dumps(asdict(self)))

    def is_running(self) -> bool:
        """Return whether its raylet runs, without which nothing serves for long."""
        return any(process.name() == RAYLET for process in writers(Path(self.root)))


def read_record(folder: Path) -> DetachedServer | None:
    """Return the record in a folder of this user, if there is one."""
    with suppress(OSError, ValueError, TypeError):
        if folder.stat().st_uid == os.geteuid():
            return DetachedServer(**json.loads((folder / RECORD).read_text()))
    return None


def detached_servers(parent: Path) -> list[DetachedServer]:
    """Return the detached servers with folders below `parent`, also those whose Ray has ended."""
    found = (read_record(folder) for folder in sorted(parent.glob("tidemill-*")))
    return [server for server in found if server is not None and Path(server.root).parent == parent]


@contextmanager
def lasting_folder(prefix: str, parent: Path) -> Generator[Path]:
    """Yield a new folder with an empty `FILES`, locked within the block. It is removed if the block raises,
    with all processes that write there."""
    remove_abandoned([parent])
    folder, lock = _locked_folder(prefix, parent)
    try:
        (folder / FILES).mkdir(mode=0o700)
        yield folder
    except BaseException:
        remove_folder(folder)
        raise
    finally:
        os.close(lock)


@contextmanager
def private_folder(prefix: str, parent: Path) -> Generator[Path]:
    """Yield a new folder below `parent` and remove it at the end; first remove those of killed processes."""
    remove_abandoned([parent])
    folder, lock = _locked_folder(prefix, parent)
    try:
        files = folder / FILES
        files.mkdir(mode=0o700)
        yield files
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parents: Iterable[Path], *, dry_run: bool = False) -> list[Abandoned]:
    """End the processes of killed servers and remove their folders below `parents`; return what there was.
    Only look with `dry_run`."""
    found: list[Abandoned] = []
    for parent in parents:
        for folder in sorted(parent.glob("tidemill-*")):
            if _NAME.fullmatch(folder.name):
                with ExitStack() as stack:
                    if _lock_abandoned(folder, stack):
                        found.append(Abandoned(folder, _size_of(folder), writers(folder)))
                        if not dry_run:
                            remove_folder(folder)
    return found


def writers(folder: Path) -> list[psutil.Process]:
    """Return the other processes of this user that have a file below `folder` open for writing."""
    start = f"{folder.resolve()}/"
    found: list[psutil.Process] = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.NoSuchProcess):  # it has ended, or is another user's
            if pid != os.getpid() and any(path.startswith(start) for path in _written(pid)):
                found.append(psutil.Process(pid))
    return found


def _written(pid: int) -> Generator[str]:
    """Yield the paths that a process has open for writing, also those of removed files. Raises OSError."""
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                yield os.readlink(entry.path)  # noqa: PTH115 - a Path costs more than the call


def remove_folder(folder: Path) -> None:
    """End the other processes that write to a folder and remove it, its lock last: what is left of it after
    an error is still abandoned."""
    for _ in range(REMOVALS_MAX):
        end(writers(folder), 0.0)
        shutil.rmtree(folder / FILES, ignore_errors=True)
        if not (folder / FILES).exists():
            shutil.rmtree(folder, ignore_errors=True)
            return


def _size_of(folder: Path) -> int:
    num_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                num_bytes += os.lstat(f"{path}/{name}").st_blocks * 512
    return num_bytes


def _locked_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """Return a new folder and its lock, also when another process took it for an abandoned one."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # of mode 0700
        lock = -1
        with suppress(FileNotFoundError):  # it was removed
            lock = os.open(folder / LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.stat(folder / LOCK).st_ino == os.fstat(lock).st_ino:  # noqa: PTH116 - as of fstat
                return folder, lock
        if lock >= 0:
            os.close(lock)


def _lock_abandoned(folder: Path, stack: ExitStack) -> bool:
    """Lock a folder of this user until the end of `stack`; return False if a process holds its lock."""
    with suppress(OSError):
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, directory)
        if os.fstat(directory).st_uid != os.geteuid():
            return False
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        stack.callback(os.close, lock)
        found = os.fstat(lock)
        if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process runs
            server = read_record(folder)
            return server is None or not server.is_running()
    return False
