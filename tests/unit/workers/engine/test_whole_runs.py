"""Whole runs of one engine, with all of it drawn: memory, layout, strategy, guesses, late answers, a faulty
store, refusals, changed budgets, and what ends a request. The tokens are those of the plain path, no step
touches what another sequence writes (`Watched`), and all memory comes back.

`WHOLE_RUNS=9000 python -m pytest tests/unit/workers/engine/test_whole_runs.py` is a soak.
"""

import asyncio
import os
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from random import Random

import pytest

from tests.support.sim.faulty_store import FaultyStore
from tests.support.sim.fold import VOCABULARY, fold_layout
from tests.support.workers.bench import LOOK_S, Bench, Tuning, a_request, bench, prompt, run
from tidemill.kvstore.memory.demand import never
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.messages import ANNOUNCED_KEY_BYTES, Request, Sampling
from tidemill.workers.scheduling.admission import PREEMPTIONS_MAX

RUNS = 100
"""The runs of a block, which together meet all of MET."""
BLOCKS = int(os.environ.get("WHOLE_RUNS", "800")) // RUNS
QUICK_BLOCKS = 1
LONGEST = 72
NUM_REQUESTS = 9
STOP = 2
MET = frozenset(
    {
        *("preemptions", "evicted_pages_for_pages", "preemptions_for_resize"),
        *("spec_accepted_tokens", "two steps in flight", "a stop token amid right guesses"),
        *("refused", "aborted", "left", "fetched_tokens", "produced", "late"),
    }
)


def drawn_request(rng: Random, index: int, size: int, vocabulary: int) -> Request:
    """Return a request that may begin as others do, with lengths around a page boundary."""
    shared = prompt(9 + size // 2, 99, vocabulary)
    own = prompt(max(1, size - 30) + rng.randrange(20), index, vocabulary)
    tokens = (rng.choice([(), shared]) + own)[:LONGEST]
    return replace(
        a_request(
            tokens, 1 + rng.randrange(size + 20), request_id=str(index), priority=rng.choice([0, 0, 1])
        ),
        sampling=Sampling(seed=rng.randrange(3), prompt_logprobs=rng.choice([None, None, None, 1])),
        stop_token_ids=rng.choice([(), (STOP,)]),
        breakpoints=rng.choice([(), (len(shared), len(tokens))]),
        tenant=rng.choice("ab"),
        session=rng.choice(["", "s"]),
        retain_s=rng.choice([0.0, 0.0, 300.0]),
    )


async def some_of(one: Bench, request: Request, most: int) -> None:
    """Leave after some tokens, as at a stop string."""
    got: list[int] = []
    async with aclosing(one.engine.generate(request)) as deltas:
        async for delta in deltas:
            got += delta.tokens
            if len(got) >= most:
                break
    assert got == one.expected(request)[: len(got)]


async def client(one: Bench, rng: Random, request: Request, met: Counter[str]) -> None:
    await asyncio.sleep(rng.random() * rng.choice([0, 0.5, 3]))
    match rng.randrange(6):
        case 0:
            await some_of(one, request, rng.randrange(1, 18))
            met["left"] += 1
        case 1:
            work = asyncio.ensure_future(
                rng.choice([one.answer, one.engine.produce, one.engine.prefetch])(request)
            )
            await asyncio.sleep(rng.random() * 0.2)
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait([work])
            met["aborted"] += work.cancelled()
        case 2:
            met["produced"] += (await one.engine.produce(request)).depth > 0
            await one.answer(request)
        case _:
            met["fetched_tokens"] += (await one.answer(request)).fetched_tokens


async def changes(one: Bench, rng: Random, met: Counter[str], tuning: Tuning, *, resizes: bool) -> None:
    """Look at the memory and the load often, and change the budget."""
    announced = set[bytes]()
    while True:
        one.ledger.check()
        load = one.engine.load()
        assert sum(load.memory.values()) == load.budget_bytes or one.ledger.excess
        assert min(*load.memory.values(), load.queued_tokens, load.wanted_bytes) >= 0
        assert load.running_rows <= tuning.rows_max
        news = one.engine.take_announcement(full=rng.random() < 0.1)
        announced = (set[bytes]() if news.full else announced - {*news.removed}) | {*news.added}
        assert announced == {key[:ANNOUNCED_KEY_BYTES] for key in one.ledger.index.restorable_keys()}
        met["two steps in flight"] += len(one.runner.in_flight) == 2
        if resizes and rng.random() < 0.2:
            one.engine.resize(rng.choice([0, 0, 20, 1000]) * one.layout.extent_bytes)
        await asyncio.sleep(40 * LOOK_S)


async def whole_run(rng: Random, met: Counter[str]) -> None:
    kind, size = rng.randrange(4), rng.choice([1, 2, 4, 4, 16, 64])
    layout = fold_layout(
        size,
        hybrid=kind < 2,
        window=rng.choice([1, 4, 7, 100]) * (kind % 2),
        extent_bytes_min=rng.choice([1, 256, 256]),
        checkpoint_dtype="bfloat16" if kind < 2 and rng.random() < 0.5 else None,
        page_slices=1 + (size in {4, 16}),
    )
    vocabulary, rows_max, overlap = rng.choice([3, 3, VOCABULARY]), rng.choice([2, 8, 16]), rng.random() < 0.7
    tokens_max = rows_max + size + rng.choice([0, 1, 40])
    floor = extents_for(layout, LONGEST + size + 20, tokens_max * (1 + overlap))
    num_extents = floor + rng.choice([0, 0, floor, 100])
    refusals = rng.choice([0.0, 0.0, 0.03])

    def refuses(_site: str) -> bool:
        refused = rng.random() < refusals
        met["refused"] += refused
        return refused

    drafts_max = rng.choice([0, 0, 2, 4])
    tuning = Tuning(
        extents_min=floor,
        extents_max=2 * num_extents,
        interval=rng.choice([1, 1, 2, 3]),
        overlap=overlap,
        drafts_max=drafts_max,
        mtp=drafts_max == 2,
        vocabulary=vocabulary,
        rows_max=rows_max,
        policy=rng.choice(["lru", "value"]),
        checkpoints_per_path=rng.choice([2, 16]),
        refuses=refuses if refusals else never,
        late_s_max=rng.choice([0.0, 0.0, 0.05]),
    )
    met["late"] += tuning.late_s_max > 0
    resizes = rng.random() < 0.4
    requests = [drawn_request(rng, index, size, vocabulary) for index in range(NUM_REQUESTS)]
    store = FaultyStore(rng, delay_s_max=rng.choice([0.001, 0.1]))
    async with bench(store, layout=layout, num_extents=2 * num_extents) as other:
        await asyncio.gather(*map(other.engine.produce, requests[::4]))
    async with bench(
        store,
        layout=layout,
        num_extents=num_extents,
        tokens_max=tokens_max,
        strategy=rng.choice(["none", "double", "lazy"]),
        tuning=tuning,
    ) as one:
        looking = asyncio.create_task(changes(one, rng, met, tuning, resizes=resizes))
        try:
            await asyncio.gather(*(client(one, rng, request, met) for request in requests))
            assert not looking.done(), looking.exception()
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        await one.settle()
        load = one.engine.load()
        assert (load.running_rows, load.waiting_rows, load.queued_tokens) == (0, 0, 0)
        assert (load.live_bytes, load.wanted_bytes, load.state_slots) == (0, 0, 0)
        assert one.engine.preemptions_max <= PREEMPTIONS_MAX or resizes or refusals
        met.update({name: int(value) for name, value in one.engine.load().counters.items() if name in MET})
        results = [result for step in one.runner.drawn for result in step]
        met["a stop token amid right guesses"] += sum(STOP in result.tokens[:-1] for result in results)


@pytest.mark.parametrize(
    "block", [pytest.param(at, marks=[pytest.mark.slow] * (at >= QUICK_BLOCKS)) for at in range(BLOCKS)]
)
def test_tokens_are_those_of_the_plain_path(block: int) -> None:
    met = Counter[str]()
    for seed in range(block * RUNS, (block + 1) * RUNS):
        run(whole_run(Random(seed), met), seed)
    assert {name for name in MET if not met[name]} == set()
