"""One event loop for all that a test process does with gRPC, as a server has it.

gRPC hands each event to the loop of the call that it belongs to, late ones too, and its shutdown, which comes
whenever its last object is collected, waits for them: in a loop that is closed they never arrive.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import grpc.aio

from tests.support.waits import WAIT_S_MAX

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def in_loop(test: Callable[_Arguments, Coroutine[Any, Any, None]]) -> Callable[_Arguments, None]:
    """Let an async test run in this loop, for a bounded time."""

    @wraps(test)
    def in_it(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        run(test(*args, **kwargs), 3 * WAIT_S_MAX)

    return in_it


def run(coroutine: Coroutine[Any, Any, _Result], s_max: float | None = None) -> _Result:
    """Run the coroutine like asyncio.run, in a loop that stays open; what it leaves running is cancelled and
    awaited. Raises TimeoutError after `s_max`."""
    return _runner().run(_alone(coroutine, s_max))


@cache
def _runner() -> asyncio.Runner:
    runner = asyncio.Runner()

    async def begin() -> None:
        grpc.aio.init_grpc_aio()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  - not in its stubs

    runner.run(begin())
    return runner


async def _alone(coroutine: Coroutine[Any, Any, _Result], s_max: float | None) -> _Result:
    try:
        async with asyncio.timeout(s_max):
            return await coroutine
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
