"""A router of which a round broke goes on, and logs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BREAKS = """
import asyncio
import os
from tidemill.cluster.router.router import Router
from tidemill.cluster.processes.router_actor import RouterActor
from tidemill.cluster.settings import RouterSettings
from tidemill.kvstore.periodic import FAILED_ROUNDS

class Breaks(Router):
    def tick(self):
        raise AssertionError("a bug")

async def main():
    router = RouterActor(RouterSettings(build="__main__:Breaks"))
    await router.address()
    while FAILED_ROUNDS["silent workers"] < 3:
        await asyncio.sleep(0.05)
    print(bool(await router.address()), flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_router_survives_rounds_that_fail() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BREAKS], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "True"), ended.stderr
    assert ended.stderr.count("AssertionError: a bug") == 1, "the first of failures in a row is logged"
