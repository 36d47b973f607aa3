"""Rounds of what a process repeats: a failed one is logged once, counted, and followed by others."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError

import pytest

from tidemill.kvstore.periodic import FAILED_ROUNDS, every


class Panic(BaseException):
    """An error of a library in Rust."""


END = True


class Fatal(Exception):
    pass


def rounds(*outcomes: BaseException | bool | None) -> Callable[[], Awaitable[bool | None]]:
    """Return work with one of these outcomes in each round, which after the last one never ends."""
    left = list(outcomes)

    async def work() -> bool | None:
        outcome = left.pop(0) if left else await asyncio.Event().wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return work


async def _cancelled_call() -> bool:
    call = asyncio.get_running_loop().create_future()
    call.cancel()
    return await call


@pytest.mark.parametrize(
    "error", [ValueError("a"), AssertionError(), RecursionError(), Panic(), CancelledError()], ids=repr
)
def test_rounds_follow_a_failed_one(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(every(0, rounds(None, error, error, None, error, END), task := repr(error)))
    assert FAILED_ROUNDS[task] == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING", "ERROR"]


def test_call_that_another_task_cancelled_is_a_failed_round() -> None:
    works = iter([_cancelled_call, rounds(END)])
    asyncio.run(every(0, lambda: next(works)(), "calls"))  # noqa: PLW0108 - the next one each time
    assert FAILED_ROUNDS["calls"] == 1


def test_fatal_errors_end_the_rounds() -> None:
    with pytest.raises(Fatal):
        asyncio.run(every(0, rounds(ValueError(), Fatal()), "fatal", fatal=(Fatal,)))
    assert FAILED_ROUNDS["fatal"] == 1


@pytest.mark.parametrize("swallowed", [False, True])
def test_cancelled_task_ends(*, swallowed: bool) -> None:
    """A library may raise another error for it, as gRPC does."""

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if swallowed:
                raise ValueError from None
            raise

    async def cancel() -> None:
        task = asyncio.create_task(every(0, work, "cancelled"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

    asyncio.run(cancel())
    assert FAILED_ROUNDS["cancelled"] == 0
