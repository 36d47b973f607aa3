"""Workers are assigned to unequal nodes and to their devices; a message explains why one fits on no node."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.processes.scaling.node_fit import (
    CPUS_MIN,
    Node,
    WorkerDemand,
    assign,
    demand_of,
    selects,
    unschedulable_reason,
)
from tidemill.cluster.processes.worker_actor import (
    actor_options,
    assigned_device,
    network_of,
    on_reserved_nodes,
)
from tidemill.cluster.settings import WorkerSettings
from tidemill.workers.parallel.network import Network
from tidemill.workers.settings import EngineSettings


def node(name: str, labels: dict[str, str] | None = None, **total: float) -> Node:
    return Node(id=name, address=name, total=total, free=total, labels=labels or {})


def demand(name: str, ranks: int = 1, labels: dict[str, str] | None = None, **each: float) -> WorkerDemand:
    return WorkerDemand(name=name, kind=name[:-2], ranks=ranks, each=each, labels=labels or {})


def test_demand_has_resources_per_rank_and_labels() -> None:
    engine = replace(GROUP, tensor_parallel_size=1, tensor_parallel_nodes=1)
    plain = WorkerSettings(name="keeper-decode-10", role="decode", engine=engine)
    assert demand_of(plain) == WorkerDemand(
        name="keeper-decode-10", kind="keeper-decode", each={"CPU": CPUS_MIN}
    )
    two = replace(engine, tensor_parallel_size=2)
    wanted = demand_of(
        replace(plain, engine=two, num_gpus=1, resources={"fast": 0.5}, labels={"side": "far"})
    )
    assert (wanted.bundle, wanted.labels) == ({"GPU": 2, "fast": 1}, {"side": "far"})


def test_selector_matches_labels_like_ray() -> None:
    for wanted, values in (
        ("a", {"a": True, "b": False, None: False}),
        ("!a", {"b": True, "a": False, None: True}),
        ("in(a,b)", {"b": True, "c": False, None: False}),
        ("in(a, b)", {"b": True}),
        ("!in(a,b)", {"a": False, "c": True, None: True}),
    ):
        assert {value: selects(wanted, value) for value in values} == values


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


def test_device_of_an_actor() -> None:
    for device, gpu_ids, visible, wanted in (
        ("cpu", [], None, "cpu"),
        ("cuda", ["3"], ["3"], "cuda:0"),  # Ray hides the others
        ("cuda", ["3"], None, "cuda:3"),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
        ("cuda", ["6"], ["4", "5", "6"], "cuda:2"),  # ... on a node that was started with some of them
        ("cuda", ["GPU-b"], ["GPU-a", "GPU-b"], "cuda:1"),
        ("cuda", [], None, "cuda"),  # without a reservation
        ("cuda:1", [], None, "cuda:1"),
    ):
        assert assigned_device(device, gpu_ids, visible) == wanted


GROUP = EngineSettings(
    model_folder=Path("none"),
    store_url="memory:",
    cache_folder=Path("none"),
    tensor_parallel_size=4,
    tensor_parallel_nodes=2,
)
TLS = MutualTls(certificate=Path("c"), key=Path("k"), ca=Path("a"))
WORKER = WorkerSettings(name="decode-0", role="decode", engine=GROUP, host=None, tls=TLS)


def test_ranks_have_the_bundles_that_the_supervisor_reserved() -> None:
    for nodes, bundles in ((2, [0, 0, 1, 1]), (1, [0, 1, 2, 3])):
        worker = replace(WORKER, engine=replace(GROUP, tensor_parallel_nodes=nodes))
        strategies = [actor_options(worker, None, rank)["scheduling_strategy"] for rank in range(4)]
        assert [strategy.placement_group_bundle_index for strategy in strategies] == bundles


def test_ranks_over_nodes_that_found_room_on_one_meet_as_on_one_node() -> None:
    apart = on_reserved_nodes(GROUP, ["a", "b"])
    assert network_of(WORKER, apart, "10.0.0.4") == Network(host="10.0.0.4", certificates=TLS)
    together = on_reserved_nodes(GROUP, ["a", "a"])
    assert (together.tensor_parallel_nodes, together.backend) == (1, "shared-memory")
    assert network_of(WORKER, together, "10.0.0.4") is None
