"""Functions that stores share: waiting for a transfer, and fitting a batch to a capacity."""

import asyncio
import gc
from collections.abc import Callable, Coroutine

import pytest

from tidemill.kvstore.stores.page_store import finish


def run_strictly(scenario: Coroutine[None, None, None]) -> None:
    """Run a scenario, and fail on errors that asyncio would only log."""
    unseen: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        await scenario

    asyncio.run(main())
    gc.collect()
    assert not unseen


def succeed(transfer: asyncio.Future[int]) -> None:
    transfer.set_result(1)


def fail(transfer: asyncio.Future[int]) -> None:
    transfer.set_exception(OSError("gone"))


def cancel(transfer: asyncio.Future[int]) -> None:
    transfer.cancel()


@pytest.mark.parametrize("end", [succeed, fail, cancel])
def test_finish_delays_cancellation_until_the_transfer_ends(
    end: Callable[[asyncio.Future[int]], None],
) -> None:
    async def scenario() -> None:
        transfer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(finish(transfer))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        end(transfer)
        await asyncio.wait({task})
        assert task.cancelled()

    run_strictly(scenario())


def test_finish_returns_the_result_or_raises_the_error() -> None:
    async def scenario() -> None:
        assert await finish(asyncio.ensure_future(asyncio.sleep(0, 5))) == 5
        failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        fail(failed)
        with pytest.raises(OSError, match="gone"):
            await finish(failed)

    run_strictly(scenario())
