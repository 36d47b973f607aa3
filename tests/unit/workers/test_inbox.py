"""Items pass immediately or wait behind earlier ones. None overtakes another, and errors are the reader's."""

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.workers.inbox import Emit, Inbox, Pause, done, generated


class Scene:
    """A reader that pauses, and goes on, when the test lets it."""

    def __init__(self) -> None:
        self.inbox = Inbox[int]()
        self.arrived: list[int] = []
        self.pauses = False
        self.may_go_on = asyncio.Semaphore(0)
        self._is_paused = False

    def take(self, item: int) -> Pause | None:
        assert not self._is_paused, "the reader is not through with an earlier item"
        self.arrived.append(item)
        self._is_paused = self.pauses
        return self._pause if self.pauses else None

    async def _pause(self) -> None:
        await self.may_go_on.acquire()
        self._is_paused = False


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(["put", "put and pause", "go on", "sleep"]), max_size=40))
def test_no_item_overtakes_another(steps: list[str]) -> None:
    async def main() -> None:
        scene, sent = Scene(), 0
        reading = asyncio.create_task(scene.inbox.read(scene.take))
        for step in [*steps, *["go on", "sleep"] * len(steps)]:
            match step:
                case "go on":
                    scene.may_go_on.release()
                case "sleep":
                    for _ in range(4):
                        await asyncio.sleep(0)
                case _:
                    scene.pauses = step == "put and pause"
                    scene.inbox.put(sent)
                    sent += 1
        assert scene.arrived == list(range(sent))
        assert not scene.inbox
        reading.cancel()
        await asyncio.wait([reading])
        scene.inbox.put(sent)
        assert len(scene.inbox) == 1, "nobody reads"

    asyncio.run(main())


@pytest.mark.parametrize("is_waiting", [True, False], ids=["passes", "waits"])
async def test_error_and_end_of_a_reader_are_its_own(*, is_waiting: bool) -> None:
    def broken(item: int) -> Pause | None:
        if item == 7:
            raise KeyError(item)
        return done

    inbox = Inbox[int]()
    if not is_waiting:
        inbox.put(7)
    reading = asyncio.create_task(inbox.read(broken))
    await asyncio.sleep(0)
    if is_waiting:
        inbox.put(7)
    with pytest.raises(KeyError):
        await reading
    inbox.put(8)
    await inbox.read(broken)


async def test_generator_is_two_items_behind_at_most_and_closes_its_source() -> None:
    emitted: list[int] = []
    ended: list[str] = []

    async def count(emit: Emit[int]) -> None:
        try:
            for number in range(100):
                emitted.append(number)
                pause = emit(number)
                if pause is not None:
                    await pause()
        finally:
            ended.append("closed")

    async with aclosing(generated(count)) as numbers:
        async for number in numbers:
            await asyncio.sleep(0)
            assert len(emitted) <= number + 3
            if number == 9:
                break
    assert ended == ["closed"]
    assert [number async for number in generated(count)] == list(range(100))
