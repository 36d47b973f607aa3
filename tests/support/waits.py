"""Waits of tests, and their bounds."""

import asyncio
import os
import time
from collections.abc import Callable

WAIT_S_MAX = float(os.environ.get("TEST_WAIT_S_MAX", "60"))
"""Seconds that only a failing test waits. Runs with planted bugs set fewer, because many make tests wait."""

EVENTUALLY_S_MAX = 300
LOOK_S = (0.02, 0.2)
"""Soon after the first look, then less and less often: looks are in the way of what they wait for."""


def eventually(holds: Callable[[], bool]) -> None:
    """Look again and again until `holds`; a bound far beyond any machine's slowness ends a run that hangs."""
    give_up_s = time.monotonic() + EVENTUALLY_S_MAX
    look_s, most_s = LOOK_S
    while not holds():
        assert time.monotonic() < give_up_s, "it never came to hold"
        time.sleep(look_s)
        look_s = min(1.2 * look_s, most_s)


async def until(holds: Callable[[], bool]) -> None:
    """Look until `holds`, which is signalled by nothing, at most for WAIT_S_MAX."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not holds():  # noqa: ASYNC110  nothing signals it
            await asyncio.sleep(0.005)
