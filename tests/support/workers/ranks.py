"""Ranks of a group as processes, each with a part that a test can hold, break and refuse things."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import NamedTuple

from tests.support.waits import WAIT_S_MAX
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.backing import Mmap
from tidemill.workers.engine.build_rank import build_rank
from tidemill.workers.execution.step import Step
from tidemill.workers.models.collectives import LEADER
from tidemill.workers.models.errors import ModelError
from tidemill.workers.parallel.link import Ended, RankLinks, accept, meeting_place
from tidemill.workers.parallel.network import Certificates, Meeting, Network, Ports
from tidemill.workers.parallel.rank import RankParts, carry_out
from tidemill.workers.settings import EngineSettings
from tidemill.workers.transfer.transfer import Moved

GRANULE = Mmap.granule_bytes
EXTENTS = 4
BREAKS, HANGS = 1, 2
"""Tokens that do this to a step."""
ENDED = 3
"""The exit status of a rank."""

SLOW = 7
"""The place of an object that a rank moves only after the file `go` is there."""

RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload([__name__])  # torch is imported once for all ranks

TLS_HOSTS = "127.0.78"
"""Each rank listens and connects at an address of its own, as if it had a node of its own."""


class Around(NamedTuple):
    """The surroundings of a rank: a folder for files of the test, and where its leader is."""

    folder: Path
    meeting: Meeting
    certificates: Certificates | None

    def network(self, index: int) -> Network | None:
        return network_of(self.certificates, index) if isinstance(self.meeting, Ports) else None


def network_of(certificates: Certificates | None, index: int) -> Network:
    return Network(host=f"{TLS_HOSTS}.{index + 2}", certificates=certificates)


Run = Callable[[Around, int], None]


class Memory(Mmap):
    """A memory that grants a number of granules."""

    def __init__(self, granted: int) -> None:
        super().__init__(EXTENTS * GRANULE)
        self.left = granted

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        if not self.left:
            raise OutOfMemory("no more is granted")
        self.left -= 1
        super().map(offset_bytes, num_bytes)

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        self.left += 1
        super().unmap(offset_bytes, num_bytes)


class Store:
    """Answers a put with its own index, and a get with the number of objects."""

    def __init__(self, folder: Path, index: int) -> None:
        self._folder = folder
        self._index = index

    async def put(self, objects: Sequence[Moved]) -> int:
        del objects
        return self._index

    async def get(self, objects: Sequence[Moved]) -> int:
        while objects[0].memory_id == SLOW and not (self._folder / "go").exists():  # noqa: ASYNC110 - a process makes it
            await asyncio.sleep(0.01)
        return len(objects)


def run_step(step: Step) -> None:
    if step[0].tokens[0] == BREAKS:
        raise ValueError("it met its token")
    if step[0].tokens[0] == HANGS:
        Event().wait()


def rank(around: Around, index: int) -> None:
    """Run a rank. Rank i is granted memory such that rank 2 is refused first."""
    part = RankParts(Memory(EXTENTS - index), Store(around.folder, index), run_step)
    _run(around, index, lambda: part)


def rank_without_model(around: Around, index: int) -> None:
    def build() -> RankParts:
        (around.folder / f"building-{index}").touch()
        if index == 2:
            while not (around.folder / "building-1").exists():  # rank 1 has come: the leader knows both
                time.sleep(0.01)
            raise ModelError("the folder is empty: download the model")
        return RankParts(Memory(1), Store(around.folder, index), run_step)

    _run(around, index, build)


def rank_that_never_comes(around: Around, index: int) -> None:
    del around, index


def rank_that_builds_for_ever(around: Around, index: int) -> None:
    def build() -> RankParts:
        (around.folder / f"building-{index}").touch()
        Event().wait()
        raise AssertionError

    _run(around, index, build)


def _run(around: Around, index: int, build: Callable[[], RankParts]) -> None:
    _end_with(carry_out(around.meeting, index, build, around.network(index)))


def rank_of_a_model(
    settings: EngineSettings, meeting: Meeting, index: int, network: Network | None = None
) -> None:
    _end_with(carry_out(meeting, index, lambda: build_rank(settings, index, meeting, network), network))


def started(ranks: Sequence[BaseProcess]) -> Ended:
    """Start them."""
    for process in ranks:
        process.start()
    return lambda: next(
        (f"exit status {process.exitcode}" for process in ranks if process.exitcode is not None), None
    )


def end(ranks: Sequence[BaseProcess]) -> None:
    """All end by themselves, for their link has ended."""
    try:
        for process in ranks:
            process.join(WAIT_S_MAX)
            assert process.exitcode is not None, "a rank outlives its link"
    finally:
        for process in ranks:
            process.kill()
            process.join()


@contextmanager
def processes(
    size: int, run: Run, certificates: Certificates | None = None, *, over_nodes: bool = False
) -> Generator[tuple[Path, Sequence[BaseProcess], Callable[[], RankLinks]]]:
    """Ranks 1 to `size - 1`; a folder for files, and a call that accepts them. All must end when their links
    do."""
    network = network_of(certificates, LEADER) if over_nodes else None
    with meeting_place(network) as place, TemporaryDirectory() as folder:
        around = Around(Path(folder), place.meeting, certificates)
        ranks = [RANKS.Process(target=run, args=(around, index)) for index in range(1, size)]
        ended = started(ranks)
        links: list[RankLinks] = []

        def accepted() -> RankLinks:
            links.append(accept(place, size, ended, network))
            return links[0]

        try:
            yield around.folder, ranks, accepted
        finally:
            for group in links:
                group.end("the test is over")
            end(ranks)


def _end_with(carrying_out: Coroutine[None, None, None]) -> None:
    async def main() -> None:
        try:
            await carrying_out
        finally:
            os._exit(ENDED)

    asyncio.run(main())
