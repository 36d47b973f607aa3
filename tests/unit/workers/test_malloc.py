"""Threads share arenas of malloc; edges, and workers that have loaded, return what is free."""

import subprocess
import sys
from pathlib import Path

import pytest

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

FREES = """
import asyncio, ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) / 256
def take():
    taken = libc.malloc(50_000)
    ctypes.memset(taken, 1, 50_000)
    return taken
def fill_and_free():
    taken = [take() for _ in range(2000)]
    take()  # behind it all
    full_mib = resident_mib()
    for pointer in taken:
        libc.free(pointer)
    assert resident_mib() > full_mib - 10, "malloc returns it without being asked"
    return full_mib
"""

OF_EDGE = """
from tidemill.cluster.processes.endpoint import run_endpoint
full_mib = fill_and_free()
run_endpoint.RETURN_S = 0.01
async def main():
    async with asyncio.timeout(60):
        task = asyncio.create_task(run_endpoint.return_memory())
        while resident_mib() > full_mib - 80:
            await asyncio.sleep(0.01)
        task.cancel()
asyncio.run(main())
"""

OF_LOADED_MODEL = """
from tidemill.workers.device import HOST, settle
from tidemill.workers.malloc import keep_freed_memory
assert keep_freed_memory()
full_mib = fill_and_free()
settle(HOST)
assert resident_mib() < full_mib - 80
"""


@pytest.mark.parametrize("program", [OF_EDGE, OF_LOADED_MODEL], ids=["an edge", "a worker that has loaded"])
def test_freed_memory_is_returned(program: str) -> None:
    code = FREES + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_share_arenas(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "info")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
