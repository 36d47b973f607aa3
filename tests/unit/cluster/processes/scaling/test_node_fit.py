"""Workers are assigned to unequal nodes, and a message explains why one fits on no node."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.processes.scaling.node_fit import (
    CPUS_MIN,
    Node,
    WorkerDemand,
    assign,
    demand_of,
    selects,
    unschedulable_reason,
)
from tidemill.cluster.settings import WorkerSettings
from tidemill.workers.settings import EngineSettings


def node(name: str, labels: dict[str, str] | None = None, **total: float) -> Node:
    return Node(id=name, address=name, total=total, free=total, labels=labels or {})


def demand(name: str, ranks: int = 1, labels: dict[str, str] | None = None, **each: float) -> WorkerDemand:
    return WorkerDemand(name=name, kind=name[:-2], ranks=ranks, each=each, labels=labels or {})


def test_demand_has_resources_per_rank_and_labels() -> None:
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
    assert wanted.bundle == {"GPU": 2, "fast": 1}
    assert wanted.labels == {"side": "far"}


@pytest.mark.parametrize(
    ("wanted", "value", "is_selected"),
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
def test_selector_matches_labels_like_ray(wanted: str, value: str | None, *, is_selected: bool) -> None:
    assert selects(wanted, value) == is_selected


def test_assign_spreads_replicas_of_role() -> None:
    nodes = [node("a", CPU=8), node("b", CPU=8)]
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    node_ids = assign([demand(name, CPU=1) for name in names], nodes, {}).node_ids
    assert node_ids["prefill-0"] != node_ids["prefill-1"]
    assert Counter(node_ids[name] for name in names[2:]).most_common(1)[0][1] == 2
    assert assign([demand("decode-0", CPU=1)], nodes, {"prefill": ["a"]}).node_ids == {"decode-0": "b"}
    assert assign([demand("decode-1", CPU=1)], nodes, {"prefill": ["b", "b"], "decode": ["a"]}).node_ids == {
        "decode-1": "b"
    }


def over(name: str, ranks: int, nodes: int, **each: float) -> WorkerDemand:
    return replace(demand(name, ranks, None, **each), nodes=nodes)


def test_assign_spreads_ranks_over_nodes_where_one_has_no_room() -> None:
    nodes = [node("a", GPU=3), node("b", GPU=4), node("c", GPU=3)]
    eight = over("decode-0", 8, 4, GPU=1)
    assert eight.bundles == [{"GPU": 2}] * 4, "Ray gets a bundle for each part that stays together"
    assert assign([eight], nodes, {}).node_ids == {"decode-0": "a"}
    assert [left.free["GPU"] for left in assign([eight], nodes, {}).remaining] == [1, 0, 1]
    assert assign([over("decode-0", 8, 2, GPU=1)], nodes, {}).node_ids == {}, "two parts of four"
    both = assign([eight, over("decode-1", 2, 2, GPU=1)], nodes, {})
    assert both.node_ids == {"decode-0": "a", "decode-1": "c"}, "the least used first"
    assert demand("decode-0", ranks=2, GPU=0.5).bundles == [{"GPU": 0.5}] * 2, "ranks on one node"
    four = assign([over("decode-0", 4, 2, GPU=1)], [node("a", GPU=1), node("b", GPU=4)], {})
    assert [left.free["GPU"] for left in four.remaining] == [1, 0], "one node has room for all"


def test_reason_describes_ranks_over_nodes() -> None:
    assert unschedulable_reason([over("mixed-0", 8, 2, GPU=1)], [node("10.0.0.4", GPU=7)]) == (
        "mixed-0 needs {GPU: 1} for each of its 8 ranks on up to 2 nodes, and no nodes of the Ray cluster "
        "fit: 10.0.0.4 has GPU: 7 of 7 free. Add a node, or lower what these workers ask for"
    )


def test_reason_describes_missing_resources_and_labels() -> None:
    nodes = [
        node("10.0.0.4", {"role": "prefill"}, CPU=8, GPU=2),
        node("10.0.0.5", {"role": "decode"}, CPU=8, GPU=1),
        node("10.0.0.6", CPU=8),
    ]
    worker = demand("decode-0", labels={"role": "decode"}, GPU=1)
    assert unschedulable_reason([worker], nodes) is None
    assert unschedulable_reason([worker, replace(worker, name="decode-1")], nodes) == (
        "decode-1 needs {GPU: 1, label role=decode} on one node, and no node of the Ray cluster fits: "
        "10.0.0.5 has GPU: 0 of 1 free; 10.0.0.4 has label role=prefill; 10.0.0.6 has no label role. "
        "Add a node, or lower what these workers ask for"
    )
    pairs = [demand(f"decode-{index}", ranks=2, GPU=1) for index in range(3)]
    assert unschedulable_reason(pairs, nodes) == (
        "decode-1 needs {GPU: 1} for each of its 2 ranks on one node (and 1 more with it), and no node "
        "of the Ray cluster fits: 10.0.0.5 has GPU: 1 of 1 free; 10.0.0.4 has GPU: 0 of 2 free; "
        "10.0.0.6 has GPU: 0 of 0 free. Add a node, or lower what these workers ask for"
    )
    many = unschedulable_reason(
        [demand("decode-0", fast=1)], [node(f"n{index}", CPU=1) for index in range(9)]
    )
    assert many is not None
    assert "; and 5 more nodes." in many
    assert "it has no node" in str(unschedulable_reason([worker], []))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["prefill", "decode"]), st.integers(1, 3))),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_assign_never_exceeds_node_resources(wanted: list[tuple[int, str, int]], gpus: list[int]) -> None:
    demands = [
        demand(f"{role}-{index}", ranks=ranks, GPU=each) for index, (ranks, role, each) in enumerate(wanted)
    ]
    nodes = [node(f"n{index}", GPU=count) for index, count in enumerate(gpus)]
    assignment = assign(demands, nodes, {})
    remaining = {left.id: left for left in assignment.remaining}
    for host in nodes:
        taken = sum(at.bundle["GPU"] for at in demands if assignment.node_ids.get(at.name) == host.id)
        assert 0 <= remaining[host.id].free["GPU"] == host.total["GPU"] - taken
    for worker in assignment.unassigned:
        assert not any(left.holds(worker) for left in remaining.values())
    assert len(assignment.node_ids) + len(assignment.unassigned) == len(demands)
    assert (unschedulable_reason(demands, nodes) is None) == (not assignment.unassigned)
