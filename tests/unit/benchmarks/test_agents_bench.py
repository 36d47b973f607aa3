"""The oracle of the agents' benchmark knows when a prompt continues, and keeps what is needed first."""

import asyncio
from random import Random

from benchmarks.memory.agents import FutureIndex, Work, pauses_of

from tidemill.cluster.simulate.agents import agents_trace
from tidemill.cluster.simulate.setup import Setup
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PageId, StateId
from tidemill.kvstore.memory.entry import Checkpoint


def test_each_turn_but_the_last_has_a_pause() -> None:
    requests = agents_trace(1, 1, Random(1))
    pauses_s = pauses_of(requests, Setup(hybrid=True))
    assert len(pauses_s) == len(requests)  # the system prompt in place of the last turn


def test_the_checkpoint_that_is_needed_last_goes_first() -> None:
    async def main() -> None:
        soon, late, never = (PageKey(name) for name in (b"soon", b"late", b"never"))
        index = FutureIndex(Setup(hybrid=True).layout, {soon: 5.0, late: 50.0})
        for number, key in enumerate((late, soon, never)):
            entry, _ = index.insert(None, key, PageId(number))
            index.keep_checkpoint(entry, Checkpoint((StateId(number),)))
            index.pin(entry)
            index.unpin(entry)
        for expected in (never, late, soon):
            found = index.cheapest_checkpoint()
            assert found is not None
            assert found.key == expected
            index.drop_checkpoint(found)

    asyncio.run(main())


def test_the_oracle_finds_at_least_what_lru_finds() -> None:
    work = Work(agents=2, blocks=600, sessions=1, pace=0.5)
    found = {order: work.run(order, "breakpoints", 600)["hit_ratio"] for order in ("lru", "oracle")}
    assert found["oracle"] > found["lru"]
