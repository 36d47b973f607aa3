"""The admission queue: the oldest is first, a cancelled request passes its position on, and no change is
lost."""

import asyncio
from random import Random

import pytest

from tests.support.workers.bench import IN_VIRTUAL_TIME
from tidemill.workers.scheduling.admission_queue import RETRY_S, AdmissionQueue

pytestmark = IN_VIRTUAL_TIME


class Clients:
    """Clients that each hold the queue for a second. Never two do."""

    def __init__(self) -> None:
        self.line = AdmissionQueue()
        self.served: list[int] = []
        self._inside = 0

    async def take(self, arrival: int) -> None:
        async with self.line.wait_until_first((0.0, arrival)):
            self._inside += 1
            assert self._inside == 1
            try:
                await asyncio.sleep(1.0)
            finally:
                self._inside -= 1
            self.served.append(arrival)


async def test_urgent_one_goes_before_those_that_came_first_and_equals_by_their_numbers() -> None:
    line = AdmissionQueue()
    served: list[tuple[float, int]] = []

    async def take(seniority: tuple[float, int]) -> None:
        async with line.wait_until_first(seniority):
            await asyncio.sleep(1.0)
            served.append(seniority)

    tasks = [asyncio.create_task(take((0.0, 0)))]
    await asyncio.sleep(0.5)
    waiting = [(20.0, 1), (10.0, 2), (-5.0, 3), (10.0, 4), (9.0, 5)]
    tasks += [asyncio.create_task(take(waiter)) for waiter in waiting]
    await asyncio.gather(*tasks)
    assert served == [(0.0, 0), *sorted(waiting)]


@pytest.mark.parametrize("seed", range(20))
async def test_request_cancelled_at_any_moment_passes_its_position_on(seed: int) -> None:
    clients, rng = Clients(), Random(seed)
    tasks = [asyncio.create_task(clients.take(arrival)) for arrival in range(12)]
    gone = set(rng.sample(range(12), 6))
    for arrival in rng.sample(sorted(gone), 6):
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.choice([0, 0, 0.5, 1.0]))
        tasks[arrival].cancel()
    await asyncio.wait(tasks)
    assert all(tasks[arrival].done() and not tasks[arrival].cancelled() for arrival in set(range(12)) - gone)
    assert len(clients.served) == len(set(clients.served))
    assert set(range(12)) - gone <= set(clients.served)
    await clients.take(99)


async def test_cancelled_in_the_moment_in_which_it_is_called() -> None:
    clients = Clients()
    first, second, third = (asyncio.create_task(clients.take(arrival)) for arrival in range(3))
    await asyncio.sleep(0.5)
    first.cancel()  # its turn goes to the second, which is cancelled before it can run
    await asyncio.wait({first})
    second.cancel()
    await third
    assert clients.served == [2]


async def test_waiting_request_notices_freed_memory_and_new_requests_and_looks_again_by_itself() -> None:
    line, now_s = AdmissionQueue(), asyncio.get_running_loop().time

    async def woken_s() -> float:
        start_s = now_s()
        await line.changed()
        return now_s() - start_s

    async def join() -> None:
        await asyncio.sleep(RETRY_S / 2)
        async with line.wait_until_first((0.0, 7)):
            pass

    line.forget_change()
    asyncio.get_running_loop().call_later(RETRY_S / 2, line.memory_freed)
    assert await woken_s() == RETRY_S / 2
    line.forget_change()
    woken, _ = await asyncio.gather(woken_s(), join())
    assert woken == RETRY_S / 2
    line.forget_change()
    assert await woken_s() == RETRY_S
    line.forget_change()
    line.memory_freed()
    assert await woken_s() == 0, "news from before is not lost"
