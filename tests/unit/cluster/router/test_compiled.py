"""Compiled placement does what its definition does, bit for bit; prefix tables answer like sets of keys."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tidemill.cluster.messages import PlacementRequest
from tidemill.cluster.router.compiled import CompiledPlacement, CompiledPrefixes, load
from tidemill.cluster.router.fleet_view import Fleet, HeartbeatArrived, WorkerLost
from tidemill.cluster.router.placement import bookings, place
from tidemill.cluster.router.prefix_table import LOG_SLACK, Chain, Prefixes, cut_keys
from tidemill.workers.messages import NO_MEMORY, Announcement, Heartbeat, Role, Speed, WorkerId

P = 64
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


@pytest.fixture(scope="session")
def compiled(kernel_cache: Path) -> CompiledPlacement:
    return load(kernel_cache)


def random_heartbeat(rng: Random, sequence: int, keys: Sequence[bytes], roles: Sequence[Role]) -> Heartbeat:
    """Return a heartbeat of one of 12 workers, with numbers of which some are equal and some are odd."""
    index = rng.randrange(12)
    speed = rng.choice(
        [
            Speed(),
            Speed(step_s=0.01, token_s=rng.choice([1e-4, 3e-5]), pair_s=rng.random() * 1e-9, row_s=1e-4),
        ]
    )
    if rng.random() < 0.5:
        speed = replace(speed, fetch_bytes_per_s=rng.choice([1e8, 1e10]))
    page_bytes = rng.choice([0, 1 << 20])
    removed = tuple(rng.sample(keys, rng.randrange(4)))
    added = tuple(keys[: rng.randrange(len(keys))])
    return heartbeat(
        f"w{index}",
        roles[index % len(roles)],
        sequence=sequence,
        announcement=Announcement(added=added, removed=removed, full=rng.random() < 0.3),
        draining=rng.random() < 0.1,
        layout=rng.choice(["a", "a", "b"]),
        publishes=rng.random() < 0.7,
        speed=speed,
        page_tokens=P,
        page_bytes=page_bytes,
        state_bytes=rng.choice([0, 77_000_000]),
        itl_target_s=rng.choice([0.0, 0.1]),
        step_tokens_max=rng.choice([512, 8192]),
        budget_bytes=rng.choice([0, 30 << 20, 80 << 30]),
        queued_s=rng.choice([0.0, rng.random()]),
        queued_tokens=rng.randrange(3000),
        running_rows=rng.randrange(4),
        waiting_rows=rng.randrange(2),
        streams=rng.randrange(3),
        memory=NO_MEMORY | {"pages_live": rng.randrange(30) << 20, "pages_cached": rng.randrange(30) << 20},
    )


def random_request(rng: Random, families: Sequence[Sequence[bytes]], number: int) -> PlacementRequest:
    keys = tuple(rng.choice(families)[: rng.randrange(40)])
    keys += tuple(rng.randbytes(8) for _ in range(rng.choice([0, 0, 5])))
    return placement_request(
        len(keys) * P + rng.randrange(1, P),
        request_id=str(number),
        keys=() if rng.random() < 0.05 else keys,
        max_new_tokens=rng.choice([1, 100, 1000]),
        avoid=frozenset(WorkerId(f"w{rng.randrange(14)}.1") for _ in range(rng.randrange(3))),
        recompute_all=rng.random() < 0.05,
    )


@pytest.mark.parametrize("roles", [ROLES, ("mixed",), ("prefill", "decode"), ("decode",)])
@pytest.mark.parametrize("seed", range(6))
def test_compiled_placement_is_its_definition(
    compiled: CompiledPlacement, seed: int, roles: Sequence[Role]
) -> None:
    """A fleet with the compiled prefix table and one with the Python one get the same events. Each request is
    placed on the first by compiled code and by the definition, and on the second by the definition."""
    rng = Random(seed)
    families = [[rng.randbytes(8) for _ in range(40)] for _ in range(3)]
    families[1][:7] = families[0][:7]
    mine, theirs = compiled.new_fleet(), Fleet()
    now_s = 0.0
    for number in range(250):
        now_s += rng.random() * 0.1
        draw = rng.random()
        if draw < 0.4:
            event = HeartbeatArrived(random_heartbeat(rng, number, rng.choice(families), roles), now_s)
        elif draw < 0.43:
            event = WorkerLost(WorkerId(f"w{rng.randrange(12)}.1"))
        else:
            request = random_request(rng, families, number)
            extra = rng.choice([None, 0.2 * np.array([rng.random() for _ in theirs.table[0]])])
            placed = compiled.place(mine, request, now_s, extra)
            route = place(theirs, request, now_s, extra)
            assert place(mine, request, now_s, extra) == route
            assert (placed and placed.route) == route
            if route is not None:
                assert placed is not None
                assert placed.booked == bookings(theirs, request, route, now_s)
                for booked in placed.booked:
                    mine.apply(booked)
                    theirs.apply(booked)
            continue
        mine.apply(event)
        theirs.apply(event)
        assert np.array_equal(mine.table, theirs.table)


@pytest.mark.parametrize("seed", range(4))
def test_compiled_prefix_table_is_its_definition(compiled: CompiledPlacement, seed: int) -> None:
    """It grows, compacts its logs, and forgets the same keys, some of which occur twice in a batch."""
    rng = Random(seed)
    space = np.array([rng.getrandbits(64) | 1 for _ in range(9000)], np.uint64)
    mine, theirs = CompiledPrefixes(compiled), Prefixes()
    for _ in range(120):
        slot, most = rng.randrange(5), rng.choice([700, 1 << 20])
        keys = space[rng.sample(range(len(space)), rng.randrange(900))]
        keys = np.concatenate([keys, keys[: rng.randrange(3)]])
        draw = rng.random()
        for table in (mine, theirs):
            if draw < 0.4:
                table.add(slot, keys, most)
            elif draw < 0.7:
                table.add_chain(slot, Chain(keys), most)
            elif draw < 0.95:
                table.remove(slot, keys[::-1])
            else:
                table.clear(slot)
        chain = Chain(space[rng.sample(range(len(space)), 300)])
        assert mine.depths(chain, 6).tolist() == theirs.depths(chain, 6).tolist()
        assert [mine.num_held(slot) for slot in range(6)] == [theirs.num_held(slot) for slot in range(6)]
        assert mine.held(slot).tolist() == theirs.held(slot).tolist()
    for slot in range(5):
        mine.clear(slot)
    assert not mine.depths(Chain(space), 6).any()


SLOTS = 5
MANY = 1 << 20


def names(numbers: list[int]) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def cut(numbers: list[int]) -> set[int]:
    return set(cut_keys(names(numbers)).tolist())


def held(table: Prefixes, slot: int) -> set[int]:
    return set(table.held(slot).tolist())


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add_chain", "remove", "clear"]),
        st.integers(0, SLOTS - 1),
        st.lists(st.integers(0, 30), max_size=20),
    ),
    max_size=30,
)


@given(operations, st.lists(st.integers(0, 30), max_size=12))
def test_prefix_table_is_a_set_of_keys_per_slot(
    steps: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    table, model = Prefixes(), [set[int]() for _ in range(SLOTS)]
    for operation, slot, numbers in steps:
        keys = cut_keys(names(numbers))
        match operation:
            case "add":
                table.add(slot, keys, MANY)
                model[slot] |= set(numbers)
            case "add_chain":
                table.add_chain(slot, Chain(keys), MANY)
                model[slot] |= set(numbers)
            case "remove":
                table.remove(slot, keys)
                model[slot] -= set(numbers)
            case _:
                table.clear(slot)
                model[slot].clear()
        assert [table.num_held(slot) for slot in range(SLOTS)] == [len(numbers) for numbers in model]
    assert [held(table, slot) for slot in range(SLOTS)] == [cut(sorted(numbers)) for numbers in model]
    depths = table.depths(Chain(cut_keys(names(chain))), SLOTS + 1)
    for slot, numbers in enumerate([*model, set[int]()]):
        deepest = [depth for depth, number in enumerate(chain, start=1) if number in numbers]
        assert depths[slot] == max(deepest, default=0)


def test_prefix_table_forgets_the_oldest_keys_first_within_its_bound() -> None:
    table, most = Prefixes(), 2000
    for batch in range(60):
        table.add(0, cut_keys(names([7_000])), most)  # added again, so that it stays
        table.add(0, cut_keys(names(list(range(100 * batch, 100 * batch + 100)))), most)
        table.add(1, cut_keys(names([7])), most)
        assert table.num_held(0) <= most + most // 4 + LOG_SLACK
    assert cut([*range(4001, 6000), 7_000]) <= held(table, 0)
    assert cut(list(range(2000))).isdisjoint(held(table, 0))
    assert held(table, 1) == cut([7]), "the keys of another slot"


def test_compiled_prefix_table_bounds_its_memory(compiled: CompiledPlacement) -> None:
    table, rng = CompiledPrefixes(compiled), np.random.default_rng(1)
    for _ in range(200):
        keys = rng.integers(1, 1 << 63, 1000, dtype=np.uint64)
        table.add(0, keys, 10_000)
        table.remove(0, keys[:900])
    assert table.num_bytes < 20_000 * 40


@pytest.mark.parametrize("is_compiled", [False, True])
def test_prefix_table_takes_zero_and_short_keys(compiled: CompiledPlacement, *, is_compiled: bool) -> None:
    table = CompiledPrefixes(compiled) if is_compiled else Prefixes()
    keys = cut_keys([b"\0" * 8, b"a", b"b"])
    table.add(2, keys[:2], MANY)
    assert table.depths(Chain(keys), 3).tolist() == [0, 0, 2]
    table.remove(2, keys[1:2])
    assert table.depths(Chain(keys), 3).tolist() == [0, 0, 1]
    assert table.depths(Chain(keys[:0]), 3).tolist() == [0, 0, 0]
    table.remove(0, keys)
    table.clear(0)
    table.add(0, keys[:0], MANY)
    assert not table.num_held(0)
    assert not len(table.held(0))
