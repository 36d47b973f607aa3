"""A router whose own work broke ends its process, so that Ray starts the next one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BREAKS = """
import asyncio
from tidemill.cluster.router.router import Router
from tidemill.cluster.processes.router_actor import RouterActor
from tidemill.cluster.settings import RouterSettings

class Breaks(Router):
    def tick(self):
        raise AssertionError("a bug")

async def main():
    router = RouterActor(RouterSettings(build="__main__:Breaks"))
    print(bool(await router.address()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_router_that_fails_ends_its_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BREAKS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "the router broke" in ended.stderr
    assert "AssertionError: a bug" in ended.stderr
