"""One event loop for all that a test process does with gRPC, as a server has it.

gRPC hands each event to the loop of the call that it belongs to, late ones too, and its shutdown, which comes
whenever its last object is collected, waits for them: in a loop that is closed they never arrive.
"""

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

import grpc.aio
import pytest

from tests.support.waits import WAIT_S_MAX

_Result = TypeVar("_Result")


def run(coroutine: Coroutine[Any, Any, _Result], s_max: float = 3 * WAIT_S_MAX) -> _Result:
    """Run the coroutine like asyncio.run, in a loop that stays open; what it leaves running is cancelled and
    awaited. Raises TimeoutError after `s_max`."""
    return _runner().run(_alone(coroutine, s_max))


IN_GRPC_LOOP = pytest.mark.run_with.with_args(run)
"""The mark of files whose tests are coroutines for `run`."""


@cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner()

    async def begin() -> None:
        grpc.aio.init_grpc_aio()

    runner.run(begin())
    return runner


async def _alone(coroutine: Coroutine[Any, Any, _Result], s_max: float) -> _Result:
    try:
        async with asyncio.timeout(s_max):
            return await coroutine
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
