"""When requests are sent: open loop by arrival times, closed loop by a number of requests at a time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

from tidemill.cluster.bench.client import LoadClient, RequestResult
from tidemill.cluster.bench.workloads import Item, Workload


def arrivals_s(count: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """Return `count` ascending arrival times with `rate` per second, as `vllm bench serve` draws them.

    The intervals have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier,
    infinity is even. They are scaled so that the last request comes after `count / rate` seconds.
    """
    if rate == inf:
        return [0.0] * count
    at_s = 0.0
    times_s: list[float] = []
    for _ in range(count):
        at_s += 1.0 if burstiness == inf else rng.gammavariate(burstiness, 1.0)
        times_s.append(at_s)
    return [time_s * count / rate / at_s for time_s in times_s]


def timed(
    workload: Workload, rng: Random, *, rate: float = inf, burstiness: float = 1.0, self_timed: bool = False
) -> Workload:
    """Return the workload with arrival times of the requests that wait for no other.

    With `self_timed` they are those of the workload, scaled to `rate` if that is finite.
    """
    heads = [number for number, item in enumerate(workload.items) if item.after is None]
    if self_timed:
        own_s = [workload.items[number].at_s for number in heads]
        last_s = max(own_s, default=0.0)
        scale = 1.0 if rate == inf or not last_s else len(heads) / rate / last_s
        times_s = [at_s * scale for at_s in own_s]
    else:
        times_s = arrivals_s(len(heads), rate, burstiness, rng)
    items = list(workload.items)
    for number, at_s in zip(heads, times_s, strict=True):
        items[number] = replace(items[number], at_s=at_s)
    return replace(workload, items=tuple(items))


async def run_load(
    client: LoadClient,
    workload: Workload,
    concurrency: int | None = None,
    on_answer: Callable[[RequestResult], None] = lambda _: None,
) -> list[RequestResult]:
    """Send every request at its time, at most `concurrency` at a time (None: no limit).

    Requests wait in order for a free place, and the time in which they do is part of no figure.
    """
    free = asyncio.Semaphore(concurrency or max(1, len(workload.items)))
    answered = [asyncio.Event() for _ in workload.items]
    start_s = client.clock_s()

    async def request(index: int, item: Item) -> RequestResult:
        if item.after is not None:
            await answered[item.after].wait()
            await asyncio.sleep(item.pause_s)
        else:
            await asyncio.sleep(item.at_s + item.pause_s - (client.clock_s() - start_s))
        async with free:
            result = await client.send(item, start_s)
        answered[index].set()
        on_answer(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(request(index, item)) for index, item in enumerate(workload.items)]
    return [task.result() for task in tasks]
