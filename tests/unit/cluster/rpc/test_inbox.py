"""Plain tokens go to a sink or wait for the reader, and no token overtakes another."""

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.scripted_engine import FIRST, WORKER, frontend, request, run, serving
from tidemill.cluster.rpc.codec import Trial
from tidemill.cluster.rpc.inbox import Inbox
from tidemill.workers.messages import Delta, WorkerGone

STEPS = st.lists(st.sampled_from(["taken", "refused", "two", "news", "pass on", "pause"]), max_size=40)


class Scene:
    """A reader that passes on what it read when the test lets it, and a sink that the test answers."""

    def __init__(self) -> None:
        self.inbox = Inbox(self._sink)
        self.arrived: list[int] = []
        self.sent = 0
        self.may_pass = asyncio.Semaphore(0)
        self._takes = True
        self._held = 0  # items that the reader has and has not passed on

    def _sink(self, token: int) -> bool:
        assert not self._held, "the reader has not passed on what came before"
        if self._takes:
            self.arrived.append(token)
        return self._takes

    async def read(self) -> None:
        while True:
            item = await self.inbox.get()
            assert isinstance(item, Delta)
            self._held += 1
            await self.may_pass.acquire()
            self.arrived += item.tokens
            self._held -= 1

    def send(self, *, is_taken: bool) -> None:
        self._takes = is_taken
        if not self.inbox.take(self.sent):
            self.inbox.put(Delta(tokens=(self.sent,)))
        self.sent += 1

    async def step(self, step: str) -> None:
        match step:
            case "two":
                self.inbox.put(Delta(tokens=(self.sent, self.sent + 1)))
                self.sent += 2
            case "news":
                self.inbox.put(Trial(alone=True))
            case "pass on":
                self.may_pass.release()
            case "pause":
                for _ in range(4):
                    await asyncio.sleep(0)
            case _:
                self.send(is_taken=step == "taken")


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_tokens_arrive_in_order_whether_or_not_a_sink_takes_them(steps: list[str]) -> None:
    async def main() -> None:
        scene = Scene()
        reading = asyncio.create_task(scene.read())
        for step in [*steps, *["pass on"] * len(steps), *["pause"] * len(steps)]:
            await scene.step(step)
        assert scene.arrived == list(range(scene.sent))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not scene.inbox.take(scene.sent), "no reader waits"

    run(main())


def test_error_of_a_sink_reaches_the_reader_alone() -> None:
    def broken(token: int) -> bool:
        raise KeyError(token)

    async def main() -> None:
        inbox = Inbox(broken)
        reading = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        assert inbox.take(7)
        with pytest.raises(KeyError):
            await reading

    run(main())


def test_failure_behind_tokens_is_raised_behind_them() -> None:
    async def main() -> None:
        inbox = Inbox()
        inbox.put(FIRST)
        inbox.put(WorkerGone("lost"))
        assert await inbox.get() == FIRST
        with pytest.raises(WorkerGone):
            await inbox.get()

    run(main())


def test_tokens_of_a_worker_go_past_a_reader_that_waits() -> None:
    """The first and the last item are the stream's, which say more than a token."""

    async def main() -> None:
        sunk: list[int] = []

        def sink(token: int) -> bool:
            sunk.append(token)
            return True

        async with (
            serving() as (engine, address),
            frontend() as peers,
            aclosing(peers.generate(WORKER, address, request("a"), sink)) as deltas,
        ):
            first = asyncio.ensure_future(anext(deltas))
            await engine.until(lambda engine: "a" in engine.calls)
            engine.step(("a", FIRST))
            assert await first == FIRST
            last = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0)
            for token in (7, 8):
                engine.step(("a", Delta(tokens=(token,))))
            engine.step(("a", Delta(tokens=(9,), finish="length")))
            assert await last == Delta(tokens=(9,), finish="length")
            assert sunk == [7, 8]

    run(main())
