"""The budget of memory: overload, one request at a time, changes while requests run, and refusals."""

import asyncio
from statistics import median

import pytest

from tests.support.sim.fold import fold_layout
from tests.support.workers.bench import (
    ATTENTION_ONLY,
    HYBRID,
    IN_VIRTUAL_TIME,
    TIGHT,
    Tuning,
    a_request,
    bench,
    prompt,
)
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import PAGES, STATES, Layout
from tidemill.kvstore.memory.backing import Fixed
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.messages import Request
from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.scheduling.admission import PREEMPTIONS_MAX

pytestmark = IN_VIRTUAL_TIME

layouts = pytest.mark.parametrize(
    "layout", [HYBRID, ATTENTION_ONLY, TIGHT], ids=["hybrid", "attention", "tight"]
)
STRATEGIES: tuple[CheckpointStrategy, ...] = ("none", "double", "lazy")
strategies = pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        *(pytest.param(HYBRID, name, id=f"{name}-hybrid") for name in STRATEGIES),
        *(pytest.param(TIGHT, name, id=f"{name}-tight") for name in STRATEGIES),
        pytest.param(ATTENTION_ONLY, "lazy", id="attention"),  # without states there is nothing to checkpoint
    ],
)


def work_of(requests: list[Request]) -> int:
    """Tokens that have to be computed when nothing is shared and nothing is lost."""
    return sum(len(request.tokens) + request.max_new_tokens - 1 for request in requests)


def requests_of(count: int, num_tokens: int, max_new_tokens: int) -> list[Request]:
    return [
        a_request(prompt(num_tokens + seed % 7, seed), max_new_tokens, request_id=str(seed))
        for seed in range(count)
    ]


@strategies
async def test_overload_that_lasts(layout: Layout, strategy: CheckpointStrategy) -> None:
    """Need more than ten times the memory for minutes. No request is preempted more often than promised. A
    preempted one resumes at its last checkpoint, so little is computed twice. The loop stands still only
    while memory changes hands: before the first step, and after the last one."""
    requests = requests_of(64, 20, 60)
    num_extents = 128 // layout.pages_per_extent

    tuning = Tuning(step_s_max=0.3)
    async with bench(strategy=strategy, layout=layout, num_extents=num_extents, tuning=tuning) as one:
        work = asyncio.create_task(one.answer_all(requests))
        looks: list[float] = []
        while not work.done():
            load = one.engine.load()
            if load.waiting_rows:
                unused = load.memory["empty"] + load.memory["unmapped"]
                looks.append(1 - unused / load.budget_bytes)
            await asyncio.sleep(0.5)
        await work
        assert len(looks) > 2 * 100, "minutes"
        # admission leaves a page for each that runs, which in the tight layout is an extent
        assert median(looks) >= (0.94 if layout is TIGHT else 0.99)
        assert len(one.engine.preempted) > 0
        assert one.engine.preemptions_max <= PREEMPTIONS_MAX
        assert one.count("computed_tokens") <= 1.25 * work_of(requests)
        assert one.idle_turns <= 5


@strategies
async def test_down_to_the_floor_and_up_again(layout: Layout, strategy: CheckpointStrategy) -> None:
    """The youngest lose their memory first, and all resume exactly."""
    floor = extents_for(layout, 63)
    requests = requests_of(8, 20, 37)

    tuning = Tuning(extents_min=floor, extents_max=300)
    async with bench(strategy=strategy, layout=layout, num_extents=200, tuning=tuning) as one:
        work = asyncio.create_task(one.answer_all(requests))

        def ran() -> set[str]:
            return {row.sequence_id for step in one.runner.steps for row in step}

        await one.until(lambda: len(ran()) == 8 and one.count("generated_tokens") > 8 * 10)
        assert one.engine.load().running_rows == 8
        order = [name.split("#")[0] for name in sorted(ran(), key=_arrival)]
        one.engine.resize(0)
        assert one.ledger.budget_extents == floor, "never less"
        await one.until(lambda: not one.ledger.excess)
        gone = list(one.engine.preempted)
        assert gone == order[::-1][: len(gone)]
        assert 0 < len(gone) <= 8
        await asyncio.sleep(0.1)
        assert 0 < one.engine.load().running_rows < 8
        one.engine.resize(1000 * layout.extent_bytes)
        assert one.ledger.budget_extents == 300, "never more"
        await one.until(lambda: one.engine.load().running_rows == 8)
        assert sorted(one.engine.preempted) == sorted(set(one.engine.preempted)), "once each"
        await work
        assert one.count("preemptions_for_resize") == len(one.engine.preempted)


@layouts
async def test_cached_objects_are_evicted_before_running_requests(layout: Layout) -> None:
    floor = extents_for(layout, 63)

    async with bench(layout=layout, num_extents=200, tuning=Tuning(extents_min=floor)) as one:
        await one.answer_all(requests_of(30, 20, 10))
        await one.settle()
        work = asyncio.create_task(one.answer(a_request(prompt(20, 77), 40)))
        await one.until(lambda: one.engine.load().running_rows == 1)
        kept = one.ledger.usage()
        assert kept.extents[PAGES] + kept.extents[STATES] > floor
        one.engine.resize(0)
        await one.until(lambda: not one.ledger.excess)
        await work
        used = one.ledger.usage()
        assert used.extents[PAGES] + used.extents[STATES] + used.empty_extents <= floor
        assert one.count("evicted_pages_for_resize") > 0
        if layout is TIGHT:  # an extent holds one thing, so nothing that runs is in the way
            assert one.engine.preempted == []


async def test_request_waits_while_those_that_run_need_the_last_pages() -> None:
    """Ten pages: the first request holds two or three and needs eight at its end, the prompt of the second
    one has six."""
    layout = fold_layout(4, hybrid=False, extent_bytes_min=1)

    async with bench(layout=layout, num_extents=10) as one:
        first = asyncio.create_task(one.answer(a_request(prompt(8, 1), 24, request_id="first")))
        await one.until(lambda: one.count("generated_tokens") > 0)
        await asyncio.gather(first, one.answer(a_request(prompt(24, 2), 8, request_id="second")))
        assert one.engine.preempted == []


class Grudging(Fixed):
    """Another process has the memory while `refuses` is set."""

    refuses = False

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        if self.refuses:
            raise OutOfMemory("another process has it")
        super().map(offset_bytes, num_bytes)


@layouts
@pytest.mark.parametrize("generated", [-1, 0, 30, 100])
async def test_memory_that_another_process_took_for_a_while(layout: Layout, generated: int) -> None:
    """Requests wait, and go on when it is granted again."""
    backings: list[Grudging] = []

    def backing(num_bytes: int) -> Grudging:
        backings.append(Grudging(num_bytes))
        return backings[-1]

    async with bench(layout=layout, num_extents=120, tuning=Tuning(backing=backing)) as one:
        backings[0].refuses = generated < 0
        work = asyncio.create_task(one.answer_all(requests_of(10, 20, 30)))
        await one.until(lambda: one.count("generated_tokens") >= generated)
        backings[0].refuses = True
        await asyncio.sleep(60)
        if generated < 0:
            assert one.count("computed_tokens") == 0
        backings[0].refuses = False
        await work
        assert one.engine.preemptions_max <= PREEMPTIONS_MAX


def _arrival(sequence_id: str) -> int:
    return int(sequence_id.split("#")[1])
