"""Temporary folders that this user alone may enter and that do not outlive their process for long.

/tmp/tidemill-x7k2w9qa/         mode 0700
  .lock                         locked by the process while it runs, whatever ends it
  files/                        the folder to use; what others make of its mode does not matter
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
FILES = "files"


@contextmanager
def private_folder(prefix: str, parent: Path) -> Generator[Path]:
    """Yield a new folder below `parent` and remove it at the end; first remove those of the same prefix whose
    process was killed."""
    for abandoned in parent.glob(f"{prefix}*"):
        if re.fullmatch(f"{re.escape(prefix)}[a-z0-9_]{{8}}", abandoned.name):
            _remove_abandoned(abandoned)
    folder, lock = _locked_folder(prefix, parent)
    try:
        files = folder / FILES
        files.mkdir(mode=0o700)
        yield files
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


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


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user with a lock that no process holds."""
    with suppress(OSError):
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(directory).st_uid != os.geteuid():
                return
            lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process runs
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
        finally:
            os.close(directory)
