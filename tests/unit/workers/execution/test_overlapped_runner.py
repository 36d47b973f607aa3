"""Steps on a device that answers late: tokens, page tables and buffers are those of steps in turn."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.workers.late import LateStream
from tests.unit.workers.execution.test_model_runner import NO_CACHES, Echo, a_row, draws_at, noise
from tidemill.kvstore.layout import PageId
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.overlapped_runner import OverlappedRunner
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Drawn, Row
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.inputs import Caches, Inputs, Kept

Opened = Callable[[Echo], AbstractContextManager[tuple[TorchRunner, LateStream | None]]]

GREEDY = Sampling(temperature=0.0)
ROWS_MAX, TABLE_WIDTH = 4, 6


@contextmanager
def plain_runner(model: Echo) -> Generator[tuple[TorchRunner, None]]:
    runner = TorchRunner(model, NO_CACHES, 4, threads=1)
    yield runner, None
    runner.close()


@contextmanager
def late_runner(model: Echo) -> Generator[tuple[OverlappedRunner, LateStream]]:
    stream = LateStream()
    tables = PageTables(ROWS_MAX, TABLE_WIDTH, windows=False)
    runner = OverlappedRunner(model, NO_CACHES, 4, 1, stream, None, tables)
    yield runner, stream
    runner.close()
    stream.close()


def pending(name: str, start: int, sampling: Sampling = GREEDY) -> Row:
    return a_row(name, (PENDING,), start, draws_at(start + 1, sampling))


runners = pytest.mark.parametrize("opened", [plain_runner, late_runner])


@runners
def test_pending_token_is_the_one_that_its_sequence_drew_in_the_step_before(opened: Opened) -> None:
    """The rows of the next step are in another order, and it is launched before this one begins."""
    model = Echo()
    first = (
        a_row("a", (3, 4), 0, draws_at(2, GREEDY)),
        a_row("c", (1, 2), 0),
        a_row("b", (7,), 5, draws_at(6, GREEDY)),
    )
    second = (pending("b", 6), a_row("c", (5,), 2), pending("a", 2))
    third = (pending("a", 3), pending("b", 7))

    async def main() -> list[list[Drawn]]:
        return [*await asyncio.gather(*map(runner.run, (first, second, third)))]

    with opened(model) as (runner, stream):
        one, two, three = asyncio.run(main())
    assert stream is None or stream.overlapped
    assert [len(drawn.tokens) for drawn in one] == [1, 0, 1]
    tokens = model.seen[1].tokens_T.tolist()
    assert tokens == [one[2].tokens[0], 5, one[0].tokens[0]]
    assert two[0].tokens == (int(noise(tokens[0], 6).argmax()),)
    assert model.seen[2].tokens_T.tolist() == [two[2].tokens[0], two[0].tokens[0]]
    assert [len(drawn.tokens) for drawn in three] == [1, 1]


def test_memory_is_unmapped_after_the_newest_launch() -> None:
    """A step that is launched and has not landed may read memory that is free."""
    with late_runner(Echo()) as (runner, _):

        async def main() -> None:
            seen = [runner.newest_step]
            for at in range(3):
                token = 3 if not at else PENDING
                landing = runner.run((a_row("a", (token,), at, draws_at(at + 1, GREEDY)),))
                await asyncio.to_thread(runner._thread.submit(int).result)  # it is launched
                assert runner.newest_step not in seen
                seen.append(runner.newest_step)
                await landing
                newest = runner.newest_step
                assert newest is not None
                assert newest.query()

        asyncio.run(main())


def test_tokens_that_would_end_the_answer_too_early_are_not_drawn() -> None:
    """A draw ahead knows its position, although the tokens before it are on the device."""
    stop = tuple(range(25))
    request = Request(
        request_id="", tokens=(0,), max_new_tokens=9, stop_token_ids=stop,
        sampling=Sampling(temperature=0.0, min_tokens=3),
    )  # fmt: skip

    def steps() -> list[tuple[Row]]:
        state = SamplingState(request)
        return [(a_row("a", (0 if not at else PENDING,), at, state),) for at in range(6)]

    async def main(runner: TorchRunner) -> list[list[Drawn]]:
        return [*await asyncio.gather(*map(runner.run, steps()))]

    with late_runner(Echo()) as (runner, _):
        found = asyncio.run(main(runner))
    plain = TorchRunner(Echo(), NO_CACHES, 4, threads=1)
    assert found == asyncio.run(main(plain))
    plain.close()
    assert all(drawn[0].tokens[0] >= 25 for drawn in found[:3])


@runners
@pytest.mark.parametrize("breaks", [1, 2])
def test_draws_of_a_broken_step_are_not_used(breaks: int, opened: Opened) -> None:
    """The step after it reads them on the device, so it breaks too. Page tables are right afterwards."""

    class Breaks(Echo):
        def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:
            tables.append(inputs.pages_BN.tolist())
            if len(tables) == breaks:
                raise ZeroDivisionError
            return super().forward(inputs, caches, kept)

    tables: list[list[list[int]]] = []
    steps = (
        (a_row("a", (3,), 0, draws_at(1, GREEDY)),),
        (pending("a", 1),),
        (pending("a", 2),),
        (a_row("a", (9,), 6, draws_at(7, GREEDY)), a_row("b", (9,), 9)._replace(pages=(PageId(7),) * 3)),
    )

    async def main() -> list[list[Drawn] | BaseException]:
        return await asyncio.gather(*map(runner.run, steps), return_exceptions=True)

    with opened(Breaks()) as (runner, _):
        found = asyncio.run(main())
    assert [isinstance(drawn, list) for drawn in found] == [breaks != 1, False, False, True]
    first, second = tables[-1]
    assert (first[:2], second) == ([1, 1], [7, 7, 7])


def test_step_with_an_unknown_token_changes_no_table() -> None:
    """It breaks before its launch, so the device has not seen the tables that the host has entered."""
    model = Echo()
    with late_runner(model) as (runner, _):

        async def main() -> None:
            with pytest.raises(KeyError):
                await runner.run((pending("a", 9),))
            await runner.run((a_row("a", (5,), 9),))

        asyncio.run(main())
    assert model.seen[0].pages_BN.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_tables_on_the_device_are_those_of_the_rows(seed: int) -> None:
    """Sequences come, grow, lose pages for others, and return after a while."""
    rng = Random(seed)
    tables = PageTables(ROWS_MAX, TABLE_WIDTH, windows=True)
    device = [np.zeros_like(tables.pages_SN), np.zeros_like(tables.windows_SN)]
    lists: dict[str, tuple[Any, ...]] = {}
    slots_before: dict[str, int] = {}
    for number in range(200):
        names = rng.sample("abcdefghij", rng.randrange(1, ROWS_MAX + 1))
        for name in names:
            old = lists.get(name, ())
            match rng.randrange(4):
                case 0:
                    lists[name] = (*old, rng.randrange(1, 99))[-TABLE_WIDTH:]
                case 1:
                    lists[name] = tuple(rng.randrange(1, 99) for _ in range(rng.randrange(TABLE_WIDTH + 1)))
        step = tuple(
            a_row(name, (1,), 0)._replace(pages=lists.get(name, ()), windows=lists.get(name, ())[::-1])
            for name in names
        )
        changes = tables.update(step)
        if number % 37 == 36:  # a launch fails
            tables.forget()
            slots_before = {}
            continue
        device[0].reshape(-1)[changes.at_D] = changes.pages_D
        device[1].reshape(-1)[changes.window_at_D] = changes.windows_D
        assert len(set(changes.slots_B.tolist())) == len(step)
        slots = dict(zip(names, changes.slots_B.tolist(), strict=True))
        for row, slot in zip(step, changes.slots_B, strict=True):
            assert device[0][slot, : len(row.pages)].tolist() == list(row.pages)
            assert device[1][slot, : len(row.windows)].tolist() == list(row.windows)
        assert all(slots[name] == slot for name, slot in slots_before.items() if name in slots)
        others = {slot for name, slot in slots.items() if name not in slots_before}
        assert not others & set(slots_before.values()), "the slot of a row of the step before"
        slots_before = slots


def test_unchanged_tables_change_nothing() -> None:
    tables = PageTables(ROWS_MAX, TABLE_WIDTH, windows=False)
    row = a_row("a", (1,), 0)
    assert len(tables.update((row,)).at_D) == len(row.pages)
    assert len(tables.update((row,)).at_D) == 0
    assert tables.update((row._replace(pages=(*row.pages, PageId(8))),)).pages_D.tolist() == [8]


class Headless(Echo):
    """Echo without logits."""

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH[:, :0]


@runners
@pytest.mark.parametrize("kind", [Echo, Headless])
def test_rows_pool_behind_their_last_tokens(opened: Opened, kind: type[Echo]) -> None:
    """A step without such a row may be launched ahead of one that has some."""

    def pools() -> SamplingState:
        return SamplingState(Request(request_id="", tokens=(0,), max_new_tokens=0, pools=True))

    steps = (
        (a_row("a", (3, 4), 0, pools()), a_row("c", (1, 2), 0), a_row("b", (7,), 5, pools())),
        (a_row("d", (6, 5), 0),),
        (a_row("c", (9,), 2, pools()), a_row("d", (8,), 2, pools())),
    )

    async def main() -> list[list[Drawn]]:
        return [*await asyncio.gather(*map(runner.run, steps))]

    with opened(kind()) as (runner, _):
        one, two, three = asyncio.run(main())
    assert [drawn.pooled for drawn in two] == [b""]
    numbers = noise if kind is Echo else lambda *end: torch.tensor(end, dtype=torch.float32)
    ends = ((4, 1), None, (7, 5), (9, 2), (8, 2))
    for end, drawn in zip(ends, (*one, *three), strict=True):
        assert drawn == Drawn(pooled=b"" if end is None else numbers(*end).numpy().tobytes())
