"""Threads share arenas of malloc, so that the memory that one has freed serves another."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import ctypes, re, threading
from tidemill.workers.malloc import ARENAS_MAX, share_arenas
assert share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
ready, done = threading.Barrier(17), threading.Event()
def hold():
    libc.malloc(1000)
    ready.wait()
    done.wait()
for _ in range(16):
    threading.Thread(target=hold, daemon=True).start()
ready.wait()
libc.fopen.restype = ctypes.c_void_p
name = __import__("sys").argv[1].encode()
file = ctypes.c_void_p(libc.fopen(name, b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
arenas = len(re.findall("<heap nr=", open(name).read()))
done.set()
assert 1 <= arenas <= ARENAS_MAX, arenas
"""


def test_threads_share_arenas(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "info")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
