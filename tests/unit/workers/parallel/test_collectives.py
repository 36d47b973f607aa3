"""Exchanges between ranks: columns side by side, in every order of calls, and an end when a rank is gone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.parity.sharded import over_gloo
from tests.support.waits import WAIT_S_MAX
from tidemill.workers.models.collectives import ALONE, LEADER
from tidemill.workers.parallel.distributed import Distributed
from tidemill.workers.parallel.errors import GroupBroken
from tidemill.workers.parallel.shared_memory import SharedMemory

Met = Distributed | SharedMemory
Meet = Callable[[Path, int, int, float], Met]
Result = TypeVar("Result")
MEETINGS: dict[str, Meet] = {
    "gloo": over_gloo,
    "shared memory": lambda folder, index, size, wait_s: SharedMemory(
        folder, index, size, wait_s, place_bytes=256
    ),
}
LATE_S = 0.2

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["gather", "reduce", "gather_to_leader", "broadcast"]),
        st.integers(1, 9),
        st.integers(1, 8),
        st.sampled_from([torch.float32, torch.int64]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(params=MEETINGS)
def meet(request: pytest.FixtureRequest) -> Meet:
    return MEETINGS[request.param]


def on_threads(
    meet: Meet, size: int, run: Callable[[Met], Result], wait_s: float = WAIT_S_MAX
) -> list[Result]:
    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def one(index: int) -> Result:
            with closing(meet(Path(folder), index, size, wait_s)) as ranks:
                return run(ranks)

        return list(threads.map(one, range(size)))


def columns_of(width: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, tokens * width + 1).view(tokens, width).to(dtype)


@settings(max_examples=12)
@given(calls=CALLS, size=st.integers(2, 4), dropped=st.integers(0, 3))
def check_calls(meet: Meet, calls: list[tuple[str, int, int, torch.dtype]], size: int, dropped: int) -> None:
    def run(ranks: Met) -> None:
        for call, tokens, columns, dtype in calls:
            everything = columns_of(size * columns, tokens, dtype)
            mine = everything[:, ranks.index * columns :][:, :columns]
            width = max(1, size * columns - dropped)
            leads = ranks.index == LEADER
            match call:
                case "gather":
                    found = ranks.gather(mine, width)
                    assert torch.equal(found, everything[:, :width])
                    assert found.is_contiguous()
                case "reduce":
                    terms = everything * (ranks.index + 1)
                    assert torch.equal(ranks.reduce(terms), everything * (size * (size + 1) // 2))
                case "gather_to_leader":
                    found = ranks.gather_to_leader(mine, width)
                    assert torch.equal(found, everything[:, : width if leads else 0])
                case _:
                    received = everything.clone() if leads else torch.zeros_like(everything)
                    ranks.broadcast(received)
                    assert torch.equal(received, everything)

    on_threads(meet, size, run)


def test_any_order_of_calls_puts_the_right_columns_side_by_side(meet: Meet) -> None:
    check_calls(meet)


def test_rank_may_be_ahead_of_the_others(meet: Meet) -> None:
    """Its data must stay until the slowest has read it."""
    rounds = 200

    def run(ranks: Met) -> None:
        for number in range(rounds):
            if ranks.index == number % 3:
                sum(range(20_000))
            found = ranks.gather(torch.full((2, 3), float(3 * number + ranks.index)), 9)
            wanted = torch.arange(3.0).repeat_interleave(3) + 3 * number
            assert torch.equal(found, wanted.expand(2, 9))

    on_threads(meet, 3, run)


def test_sum_has_the_same_bits_on_every_rank_and_of_every_part(meet: Meet) -> None:
    """The terms are such that every order of adding has other bits."""
    terms_RTN = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(1)).exp()

    def run(ranks: Met) -> tuple[torch.Tensor, torch.Tensor]:
        own_TN = terms_RTN[ranks.index]
        return ranks.reduce(own_TN.clone()), ranks.reduce(own_TN[7:8].clone())

    found = on_threads(meet, 3, run)
    assert all(torch.equal(whole, found[0][0]) for whole, _ in found)
    assert torch.allclose(found[0][0], terms_RTN.sum(0))
    assert all(torch.equal(row, whole[7:8]) for whole, row in found)
    assert torch.equal(found[0][0], terms_RTN[0] + terms_RTN[1] + terms_RTN[2])


def test_end_of_a_rank_ends_the_wait_of_the_others(meet: Meet) -> None:
    def run(ranks: Met) -> str:
        ranks.gather(torch.ones(1, 2), 6)
        if ranks.index == 1:
            ranks.close()
            return "gone"
        with pytest.raises(GroupBroken):
            ranks.gather(torch.ones(1, 2), 6)
        return "told"

    assert on_threads(meet, 3, run) == ["told", "gone", "told"]


def test_missing_rank_ends_the_wait_of_the_others(meet: Meet, tmp_path: Path) -> None:
    with pytest.raises(GroupBroken):
        meet(tmp_path, 1, 2, LATE_S)


def test_silent_rank_ends_the_wait_of_the_others(meet: Meet) -> None:
    called = Event()

    def run(ranks: Met) -> None:
        if ranks.index == LEADER:
            with pytest.raises(GroupBroken):
                ranks.gather(torch.ones(1, 2), 4)
            called.set()
        else:
            called.wait()

    on_threads(meet, 2, run, wait_s=10 * LATE_S)  # they must have met by then


def test_one_alone_exchanges_nothing() -> None:
    x = torch.ones(2, 3)
    assert ALONE.gather(x, 3) is ALONE.gather_to_leader(x, 3) is ALONE.reduce(x) is x
    ALONE.broadcast(x)
    with pytest.raises(AssertionError):
        ALONE.gather(x, 2)
