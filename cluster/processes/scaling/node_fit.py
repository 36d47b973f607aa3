"""Assign workers to nodes of a Ray cluster, and explain why a worker fits on no node. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidemill.cluster.settings import WorkerSettings

NODES_DESCRIBED_MAX = 4
"""The maximum number of nodes that a message describes."""

CPUS_MIN = 0.001
"""The CPUs of a worker that asks for no resource: nearly none, but it excludes nodes that offer no CPU."""

ROUNDING = 1e-6
"""The tolerance of comparisons; Ray counts in ten-thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDemand:
    """The demand of a worker: up to `nodes` nodes with these labels, and these resources there for each of
    its ranks. A bundle is the part of the ranks that is always on one node: there are `nodes` of them."""

    name: str
    kind: str = ""  # replicas of one kind are spread over nodes
    ranks: int = 1
    nodes: int = 1
    each: Mapping[str, float] = field(default_factory=dict[str, float])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return Ray's bundles: ranks that are all on one node have one each."""
        return [dict(self.each)] * self.ranks if self.nodes == 1 else [self.bundle] * self.nodes

    @property
    def bundle(self) -> dict[str, float]:
        return {name: amount * (self.ranks // self.nodes) for name, amount in self.each.items()}

    def __str__(self) -> str:
        amounts = [f"{name}: {amount:g}" for name, amount in self.each.items()]
        labels = [f"label {name}={value}" for name, value in self.labels.items()]
        ranks = f" for each of its {self.ranks} ranks" if self.ranks > 1 and amounts else ""
        nodes = "one node" if self.nodes == 1 else f"up to {self.nodes} nodes"
        return f"{self.name} needs {{{', '.join([*amounts, *labels])}}}{ranks} on {nodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is up; `free` is the unused part of its `total` resources."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def has_labels_of(self, demand: WorkerDemand) -> bool:
        return all(selects(wanted, self.labels.get(name)) for name, wanted in demand.labels.items())

    def holds(self, demand: WorkerDemand) -> bool:
        """Return whether this node has room for a bundle of the demand."""
        return self.has_labels_of(demand) and all(
            self.free.get(name, 0.0) + ROUNDING >= amount for name, amount in demand.bundle.items()
        )

    def without(self, demand: WorkerDemand) -> "Node":
        """Return this node with a bundle of the demand taken from its free resources."""
        taken = {name: self.free.get(name, 0.0) - amount for name, amount in demand.bundle.items()}
        return replace(self, free={**self.free, **taken})

    def describe(self, demand: WorkerDemand) -> str:
        """Describe the labels or resources of this node that matter to the demand."""
        if not self.has_labels_of(demand):
            wrong = [
                f"label {name}={self.labels[name]}" if name in self.labels else f"no label {name}"
                for name, wanted in demand.labels.items()
                if not selects(wanted, self.labels.get(name))
            ]
            return f"{self.address} has {' and '.join(wrong)}"
        amounts = [
            f"{name}: {self.free.get(name, 0.0):g} of {self.total.get(name, 0.0):g} free"
            for name in demand.each
        ]
        return f"{self.address} has {', '.join(amounts)}"


def demand_of(worker: WorkerSettings) -> WorkerDemand:
    """Return the demand of a worker; workers that a fleet started for the same role are of one kind. It names
    at least some CPU, because Ray only stays on a node where it reserves something."""
    amounts = {"CPU": worker.num_cpus, "GPU": worker.num_gpus, **worker.resources}
    each = {name: amount for name, amount in amounts.items() if amount}
    return WorkerDemand(
        name=worker.name,
        kind=worker.name.rpartition("-")[0],
        ranks=worker.engine.tensor_parallel_size,
        nodes=worker.engine.tensor_parallel_nodes,
        each=each or {"CPU": CPUS_MIN},
        labels=dict(worker.labels),
    )


def selects(wanted: str, value: str | None) -> bool:
    """Return whether Ray's selector `wanted` (`a`, `!a`, `in(a,b)` or `!in(a,b)`) accepts a label value.
    `value` is None when the node has no such label."""
    is_negated = wanted.startswith("!")
    listed = re.fullmatch(r"in\((.*)\)", wanted.removeprefix("!").strip())
    values = [item.strip() for item in listed[1].split(",")] if listed else [wanted.removeprefix("!")]
    return (value in values) != is_negated


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """The result of assigning demands to nodes one after the other. `node_ids` has the first node of each
    demand that fits, by the demand's name. `remaining` has the nodes with the resources that are left.
    `unassigned` has the demands that fit on no node."""

    node_ids: dict[str, str]
    remaining: tuple[Node, ...]
    unassigned: tuple[WorkerDemand, ...]


def assign(
    demands: Iterable[WorkerDemand], nodes: Sequence[Node], existing: Mapping[str, Iterable[str]]
) -> NodeAssignment:
    """Assign each demand to the node with the fewest workers of its kind, then with the fewest of all, and
    what has no room there to others by the same rule. `existing` has, by kind, the first node id of each
    worker that is already assigned."""
    remaining = {node.id: node for node in nodes}
    counts = {kind: Counter(ids) for kind, ids in existing.items()}
    node_ids: dict[str, str] = {}
    unassigned: list[WorkerDemand] = []
    for demand in demands:
        same = counts.setdefault(demand.kind, Counter())
        total = sum(counts.values(), Counter[str]())
        preferred = sorted(remaining, key=lambda name: (same[name], total[name]))
        taken = _bundles_on(demand, [remaining[name] for name in preferred])
        if len(taken) < demand.nodes:
            unassigned.append(demand)
            continue
        for name in taken:
            remaining[name] = remaining[name].without(demand)
        same[taken[0]] += 1
        node_ids[demand.name] = taken[0]
    return NodeAssignment(node_ids, tuple(remaining.values()), tuple(unassigned))


def _bundles_on(demand: WorkerDemand, nodes: Sequence[Node]) -> list[str]:
    """Return the node ids of the bundles that fit, which fill one of `nodes` after the other."""
    ids: list[str] = []
    for node in nodes:
        left = node
        while len(ids) < demand.nodes and left.holds(demand):
            left = left.without(demand)
            ids.append(node.id)
    return ids


def unschedulable_reason(demands: Iterable[WorkerDemand], nodes: Sequence[Node]) -> str | None:
    """Explain in one line why the first demand that does not fit fits on no node; None when all fit
    together."""
    assignment = assign(demands, nodes, {})
    if not assignment.unassigned:
        return None
    first, *others = assignment.unassigned
    more = f" (and {len(others)} more with it)" if others else ""
    fits = "no node of the Ray cluster fits" if first.nodes == 1 else "no nodes of the Ray cluster fit"
    return (
        f"{first}{more}, and {fits}: {_describe(first, assignment.remaining)}. "
        "Add a node, or lower what these workers ask for"
    )


def _describe(demand: WorkerDemand, nodes: Sequence[Node]) -> str:
    """Describe the nodes, the closest to fitting first: those with the labels, and of these the emptiest."""
    if not nodes:
        return "it has no node"

    def sort_key(node: Node) -> tuple[bool, list[float]]:
        return not node.has_labels_of(demand), [-node.free.get(name, 0.0) for name in demand.each]

    num_more = len(nodes) - NODES_DESCRIBED_MAX
    more = f"; and {num_more} more nodes" if num_more > 0 else ""
    return (
        "; ".join(node.describe(demand) for node in sorted(nodes, key=sort_key)[:NODES_DESCRIBED_MAX]) + more
    )
