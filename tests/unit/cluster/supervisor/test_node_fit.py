"""Where workers go on a cluster of unequal nodes, and what it says when there is no place."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.settings import WorkerSettings
from tidemill.cluster.supervisor.node_fit import (
    CPUS_MIN,
    Node,
    WorkerDemand,
    demand_of,
    missing,
    plan,
    selects,
)
from tidemill.workers.settings import EngineSettings


def node(name: str, labels: dict[str, str] | None = None, **total: float) -> Node:
    return Node(id=name, address=name, total=total, free=total, labels=labels or {})


def demand(name: str, ranks: int = 1, labels: dict[str, str] | None = None, **each: float) -> WorkerDemand:
    return WorkerDemand(name=name, kind=name[:-2], ranks=ranks, each=each, labels=labels or {})


def test_what_a_worker_asks_for() -> None:
    engine = EngineSettings(
        model_folder=Path("none"), memory_bytes=0, store_url="memory:", cache_folder=Path("none")
    )
    plain = WorkerSettings(name="keeper-decode-10", role="decode", engine=engine)
    assert demand_of(plain) == WorkerDemand(
        name="keeper-decode-10", kind="keeper-decode", each={"CPU": CPUS_MIN}
    )
    group = replace(
        plain,
        engine=replace(engine, tensor_parallel_size=2),
        num_gpus=1,
        resources={"fast": 0.5},
        labels={"side": "far"},
    )
    wanted = demand_of(group)
    assert wanted.all == {"GPU": 2, "fast": 1}
    assert wanted.labels == {"side": "far"}


@pytest.mark.parametrize(
    ("wanted", "value", "is_taken"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", "a", False),
        ("!a", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("in(a,b)", None, False),
        ("!in(a,b)", "a", False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", None, True),
    ],
)
def test_labels_select_as_ray_says(wanted: str, value: str | None, *, is_taken: bool) -> None:
    assert selects(wanted, value) == is_taken


def test_replicas_of_a_role_spread() -> None:
    nodes = [node("a", CPU=8), node("b", CPU=8)]
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    homes = plan([demand(name, CPU=1) for name in names], nodes, {}).homes
    assert homes["prefill-0"] != homes["prefill-1"]
    assert Counter(homes[name] for name in names[2:]).most_common(1)[0][1] == 2
    assert plan([demand("decode-0", CPU=1)], nodes, {"prefill": ["a"]}).homes == {"decode-0": "b"}
    assert plan([demand("decode-1", CPU=1)], nodes, {"prefill": ["b", "b"], "decode": ["a"]}).homes == {
        "decode-1": "b"
    }


def test_a_group_keeps_together_where_it_fits_whole() -> None:
    nodes = [node("a", GPU=3), node("b", GPU=4), node("c", GPU=3)]
    assert plan([demand("decode-0", ranks=4, GPU=1)], nodes, {}).homes == {"decode-0": "b"}
    assert plan([demand("decode-0", ranks=5, GPU=1)], nodes, {}).homes == {}


def test_what_is_missing_is_said() -> None:
    nodes = [
        node("10.0.0.4", {"role": "prefill"}, CPU=8, GPU=2),
        node("10.0.0.5", {"role": "decode"}, CPU=8, GPU=1),
        node("10.0.0.6", CPU=8),
    ]
    one = demand("decode-0", labels={"role": "decode"}, GPU=1)
    assert missing([one], nodes) is None
    assert missing([one, replace(one, name="decode-1")], nodes) == (
        "decode-1 needs {GPU: 1, label role=decode} on one node, and the Ray cluster has no such place: "
        "10.0.0.5 has GPU: 0 of 1 free; 10.0.0.4 has label role=prefill; 10.0.0.6 has no label role. "
        "Add a node, or lower what these workers ask for"
    )
    pairs = [demand(f"decode-{index}", ranks=2, GPU=1) for index in range(3)]
    assert missing(pairs, nodes) == (
        "decode-1 needs {GPU: 1} for each of its 2 ranks on one node (and 1 more with it), and the Ray "
        "cluster has no such place: 10.0.0.5 has GPU: 1 of 1 free; 10.0.0.4 has GPU: 0 of 2 free; "
        "10.0.0.6 has GPU: 0 of 0 free. Add a node, or lower what these workers ask for"
    )
    many = missing([demand("decode-0", fast=1)], [node(f"n{index}", CPU=1) for index in range(9)])
    assert many is not None
    assert "; and 5 more nodes." in many
    assert "it has no node" in str(missing([one], []))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["prefill", "decode"]), st.integers(1, 3))),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_nothing_is_given_twice(wanted: list[tuple[int, str, int]], gpus: list[int]) -> None:
    demands = [
        demand(f"{role}-{index}", ranks=ranks, GPU=each) for index, (ranks, role, each) in enumerate(wanted)
    ]
    nodes = [node(f"n{index}", GPU=count) for index, count in enumerate(gpus)]
    places = plan(demands, nodes, {})
    for one in nodes:
        taken = sum(each.all["GPU"] for each in demands if places.homes.get(each.name) == one.id)
        left = next(other for other in places.left if other.id == one.id)
        assert 0 <= left.free["GPU"] == one.total["GPU"] - taken
    for each in places.lacking:
        assert not any(one.holds(each) for one in places.left)
    assert len(places.homes) + len(places.lacking) == len(demands)
    assert (missing(demands, nodes) is None) == (not places.lacking)
