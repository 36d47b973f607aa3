"""A trial as both ends of the data plane see it, planned hand-overs, and workers that are given up."""

import asyncio
from contextlib import suppress

import pytest

from tests.unit.cluster.scripted_engine import (
    FIRST,
    LAST,
    WORKER,
    ScriptedEngine,
    collect,
    fails,
    frontend,
    request,
    run,
    serving,
)
from tidemill.cluster.data_plane import DataPlane
from tidemill.cluster.peers import SILENCE_S_MAX, GrpcPeers
from tidemill.workers.messages import DiedAlone, HandedOver, WorkerGone


async def told(engine: ScriptedEngine, name: str, *, alone: bool) -> None:
    """The engine says so, and goes on when the frontends must know."""
    tell = engine.tells[name]
    assert tell is not None
    await tell(alone)


async def begun(engine: ScriptedEngine, *names: str) -> None:
    await engine.until(lambda engine: set(names) <= set(engine.calls))


@pytest.mark.parametrize("kind", ["generate", "produce"])
def test_a_worker_that_dies_in_a_trial_is_its_requests_fault_alone(kind: str) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        plane = DataPlane(engine, WORKER)
        address = await plane.start("127.0.0.1")
        async with frontend() as peers, frontend() as others:
            suspect = (
                asyncio.create_task(collect(peers.generate(WORKER, address, request("suspect"))))
                if kind == "generate"
                else asyncio.create_task(peers.produce(WORKER, address, request("suspect")))
            )
            beside = asyncio.create_task(collect(peers.generate(WORKER, address, request("beside"))))
            cleared = asyncio.create_task(collect(others.generate(WORKER, address, request("cleared"))))
            await begun(engine, "suspect", "beside", "cleared")
            await told(engine, "cleared", alone=True)
            engine.step(("cleared", FIRST))
            await told(engine, "cleared", alone=False)
            await told(engine, "suspect", alone=True)
            await plane.stop()  # at once: everybody knows by now
            await fails(suspect, DiedAlone)
            for innocent in (beside, cleared):
                with pytest.raises(WorkerGone) as gone:
                    await innocent
                assert not isinstance(gone.value, DiedAlone)

    run(main())


def test_a_planned_hand_over_is_told_from_a_loss() -> None:
    async def main() -> None:
        async with serving() as (engine, address), frontend() as peers:
            stream = asyncio.create_task(collect(peers.generate(WORKER, address, request())))
            await begun(engine, "r")
            engine.step(("r", FIRST), ("r", HandedOver("it goes")))
            assert await fails(stream, HandedOver) == "it goes"

    run(main())


def test_a_worker_that_owes_answers_is_silent_after_a_while_and_can_be_given_up() -> None:
    async def main() -> None:
        async with serving() as (engine, address), frontend() as peers:
            assert peers.silent() == frozenset()
            stream = asyncio.create_task(collect(peers.generate(WORKER, address, request())))
            await begun(engine, "r")
            assert peers.silent() == frozenset()
            await until_silent(peers)
            engine.step(("r", FIRST))
            while peers.silent():  # noqa: ASYNC110 - the other end sends
                await asyncio.sleep(0.01)
            await until_silent(peers)
            peers.give_up({WORKER})
            assert "the router has not heard it" in await fails(stream, WorkerGone)
            await engine.until(lambda engine: not engine.calls)  # the worker was told
            assert peers.silent() == frozenset()
            again = asyncio.create_task(collect(peers.generate(WORKER, address, request("again"))))
            await begun(engine, "again")
            engine.step(("again", FIRST), ("again", LAST))
            assert await again == [FIRST, LAST]

    async def until_silent(peers: GrpcPeers) -> None:
        async with asyncio.timeout(10 * SILENCE_S_MAX):
            while WORKER not in peers.silent():  # noqa: ASYNC110 - time makes it so
                await asyncio.sleep(0.05)

    run(main())


def test_calls_are_counted_until_all_have_been_sent_their_ends() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        plane = DataPlane(engine, WORKER)
        address = await plane.start("127.0.0.1")
        try:
            async with frontend() as peers:
                fetching = asyncio.create_task(peers.prefetch(WORKER, address, request("p")))
                stream = asyncio.create_task(collect(peers.generate(WORKER, address, request())))
                await begun(engine, "p", "r")
                assert plane.num_calls == 1, "what is only prefetched is nobody's loss"
                engine.step(("r", HandedOver("it goes")))
                while plane.num_calls:  # noqa: ASYNC110 - it ends
                    await asyncio.sleep(0)
                await plane.flush()
                await plane.stop()
                await fails(stream, HandedOver)
                with suppress(WorkerGone):
                    await fetching
        finally:
            await plane.stop()

    run(main())
