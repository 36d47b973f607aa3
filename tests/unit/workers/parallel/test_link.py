"""The leader and its ranks as real processes: what it asks they do, and none outlives the others."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.waits import WAIT_S_MAX
from tests.support.workers import ranks as support
from tests.support.workers.ranks import (
    BREAKS,
    EXTENTS,
    GRANULE,
    HANGS,
    SLOW,
    Memory,
    rank,
    rank_that_builds_for_ever,
    rank_that_never_comes,
    rank_without_model,
)
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import DIGEST_BYTES, Kind, PageKey
from tidemill.workers.execution.step import Row
from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.frames import Ints, Verb, encode
from tidemill.workers.parallel.group import GroupBacking, RankMate
from tidemill.workers.parallel.link import RankLinks
from tidemill.workers.transfer.transfer import Moved

Processes = Callable[..., Any]


@pytest.fixture(params=["one machine", "TLS", "plain TCP"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Processes:
    """Return `support.processes` on one machine, or as if each rank had a node of its own."""
    certificates = issue(tmp_path / "tls", trustme.CA()) if request.param == "TLS" else None
    return partial(support.processes, certificates=certificates, over_nodes=request.param != "one machine")


def step(token: int) -> Ints:
    return encode((Row(sequence_id="a", tokens=(token,), start=0, pages=(), read=None, writes=()),))


def moved(place: int) -> list[Moved]:
    return [Moved(Kind.PAGE, PageKey(bytes(DIGEST_BYTES)), place)]


def is_ready(links: RankLinks) -> RankLinks:
    for link in links:
        link.ready.result(WAIT_S_MAX)
    return links


def ends(links: RankLinks) -> str:
    """Wait for the end of the group; why it came."""
    with pytest.raises(GroupBroken) as broken:
        links.broken.result(WAIT_S_MAX)
    return str(broken.value)


def test_every_rank_moves_its_part(processes: Processes) -> None:
    with processes(3, rank) as (_, _, accepted):
        mates = [RankMate(link) for link in is_ready(accepted())]

        async def main() -> None:
            assert await asyncio.gather(*(mate.put(moved(1)) for mate in mates)) == [1, 2]
            assert await asyncio.gather(*(mate.get([*moved(1), *moved(2)]) for mate in mates)) == [2, 2]

        asyncio.run(main())


def test_cancelled_transfer_ends_when_the_rank_has_let_go_of_its_memory(processes: Processes) -> None:
    with processes(2, rank) as (folder, _, accepted):
        (link,) = is_ready(accepted())
        mate = RankMate(link)

        async def main() -> None:
            getting = asyncio.ensure_future(mate.get(moved(SLOW)))
            await mate.put(moved(1))  # answered beside it, and after it was asked
            getting.cancel()
            await mate.put(moved(1))
            assert not getting.done()
            (folder / "go").touch()
            with pytest.raises(asyncio.CancelledError):
                await getting

        asyncio.run(main())


def test_extent_is_mapped_on_all_ranks_or_on_none(processes: Processes) -> None:
    with processes(3, rank) as (_, _, accepted):
        own = Memory(EXTENTS)
        backing = GroupBacking(own, is_ready(accepted()))
        for extent in range(EXTENTS - 2):
            backing.map(extent * GRANULE, GRANULE)
        for _ in range(2):  # and nothing is lost by a refusal
            with pytest.raises(OutOfMemory):
                backing.map(3 * GRANULE, GRANULE)
            assert own.left == 2
        backing.unmap(0, GRANULE)
        backing.map(3 * GRANULE, GRANULE)
        own.left = 0
        backing.unmap(3 * GRANULE, GRANULE)
        own.left = 0
        with pytest.raises(OutOfMemory):
            backing.map(3 * GRANULE, GRANULE)
        own.left = 1
        backing.map(3 * GRANULE, GRANULE)


@pytest.mark.parametrize("token", [0, HANGS])
def test_killed_rank_ends_all_of_them(processes: Processes, token: int) -> None:
    with processes(4, rank) as (_, ranks, accepted):
        links = is_ready(accepted())
        links.send_all(Verb.STEP, step(token))
        ranks[1].kill()
        assert ends(links) == "rank 2 is gone"
        for process in ranks:
            process.join(WAIT_S_MAX)
            assert process.exitcode is not None
        with pytest.raises(GroupBroken):
            links.send_all(Verb.STEP, step(0))


def test_pending_calls_of_a_broken_group_are_answered(processes: Processes) -> None:
    with processes(2, rank) as (_, ranks, accepted):
        links = is_ready(accepted())
        (link,) = links
        ranks[0].kill()

        async def main() -> None:
            async with asyncio.timeout(WAIT_S_MAX):
                assert await RankMate(link).get(moved(SLOW)) == 0

        asyncio.run(main())
        with pytest.raises(GroupBroken):
            GroupBacking(Memory(1), links).map(0, GRANULE)


def test_rank_whose_step_raises_reports_it_and_ends(processes: Processes) -> None:
    with processes(3, rank) as (_, ranks, accepted):
        links = is_ready(accepted())
        next(iter(links)).send(Verb.STEP, step(BREAKS))
        assert ends(links) == "rank 1 broke: ValueError: it met its token"
        for process in ranks:
            process.join(WAIT_S_MAX)


def test_rank_that_cannot_be_built_reports_why(processes: Processes) -> None:
    with processes(3, rank_without_model) as (_, _, accepted):
        links = accepted()
        assert ends(links) == "rank 2 broke: the folder is empty: download the model"
        with pytest.raises(GroupBroken):
            is_ready(links)


def test_rank_that_is_being_built_ends_with_its_leader(processes: Processes) -> None:
    with processes(2, rank_that_builds_for_ever) as (folder, _, accepted):
        accepted()
        while not (folder / "building-1").exists():
            time.sleep(0.01)


def test_rank_that_never_comes(processes: Processes) -> None:
    why = pytest.raises(GroupBroken, match="a rank does not start: exit status 0")
    with processes(2, rank_that_never_comes) as (_, _, accepted), why:
        accepted()
