"""The end of a server and of what runs beside it."""

import asyncio

import pytest

from tidemill.cluster.server import run_endpoint
from tidemill.cluster.server.run_endpoint import run_serving


class Swallows:
    """A task that loses its first cancellation, as in a library that raises another error instead."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    async def run(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                if self.num_cancelled > 1:
                    raise


def test_task_that_loses_its_cancellation_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_endpoint, "CANCEL_S", 0.02)
    swallows, stop, ended = Swallows(), asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        await ended.wait()
        await asyncio.sleep(0.1)  # its open answers
        answers.append("whole")

    async def main() -> None:
        serving = asyncio.create_task(run_serving(serve(), ended.set, stop, [swallows]))
        await asyncio.sleep(0)
        stop.set()
        async with asyncio.timeout(30):
            await serving

    answers: list[str] = []
    asyncio.run(main())
    assert swallows.num_cancelled == 2
    assert answers == ["whole"]
