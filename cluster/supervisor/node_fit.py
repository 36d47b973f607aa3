"""Which node a worker goes to, and what the nodes of a Ray cluster lack for it. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidemill.cluster.settings import WorkerSettings

NODES_TOLD_MAX = 4
"""So many nodes are described in a message."""

CPUS_MIN = 0.001
"""Of a worker that asks for nothing: next to nothing, but it keeps away from nodes that offer no CPU."""

ROUNDING = 1e-6
"""Ray counts in ten thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDemand:
    """What one worker wants: one node with these labels, and on it these resources for each of its ranks."""

    name: str
    kind: str = ""  # replicas of one kind go to different nodes
    ranks: int = 1
    each: Mapping[str, float] = field(default_factory=dict[str, float])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def all(self) -> dict[str, float]:
        return {name: amount * self.ranks for name, amount in self.each.items()}

    def __str__(self) -> str:
        wants = [f"{name}: {amount:g}" for name, amount in self.each.items()]
        labels = [f"label {name}={value}" for name, value in self.labels.items()]
        ranks = f" for each of its {self.ranks} ranks" if self.ranks > 1 and wants else ""
        return f"{self.name} needs {{{', '.join([*wants, *labels])}}}{ranks} on one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is up; `free` is what nobody has of its `total`."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def has_labels_of(self, demand: WorkerDemand) -> bool:
        return all(selects(wanted, self.labels.get(name)) for name, wanted in demand.labels.items())

    def holds(self, demand: WorkerDemand) -> bool:
        return self.has_labels_of(demand) and all(
            self.free.get(name, 0.0) + ROUNDING >= amount for name, amount in demand.all.items()
        )

    def without(self, demand: WorkerDemand) -> "Node":
        """What is left when the demand is met here."""
        taken = {name: self.free.get(name, 0.0) - amount for name, amount in demand.all.items()}
        return replace(self, free={**self.free, **taken})

    def told(self, demand: WorkerDemand) -> str:
        """This node, as far as the demand is about it."""
        if not self.has_labels_of(demand):
            wrong = [
                f"label {name}={self.labels[name]}" if name in self.labels else f"no label {name}"
                for name, wanted in demand.labels.items()
                if not selects(wanted, self.labels.get(name))
            ]
            return f"{self.address} has {' and '.join(wrong)}"
        found = [
            f"{name}: {self.free.get(name, 0.0):g} of {self.total.get(name, 0.0):g} free"
            for name in demand.each
        ]
        return f"{self.address} has {', '.join(found)}"


def demand_of(worker: WorkerSettings) -> WorkerDemand:
    """Replicas are the workers that a fleet started for one role. Where Ray is to keep to a node, it has to
    reserve something there."""
    amounts = {"CPU": worker.num_cpus, "GPU": worker.num_gpus, **worker.resources}
    each = {name: amount for name, amount in amounts.items() if amount}
    return WorkerDemand(
        name=worker.name,
        kind=worker.name.rpartition("-")[0],
        ranks=worker.engine.tensor_parallel_size,
        each=each or {"CPU": CPUS_MIN},
        labels=dict(worker.labels),
    )


def selects(wanted: str, value: str | None) -> bool:
    """Whether Ray's selector `wanted` (`a`, `!a`, `in(a,b)` or `!in(a,b)`) takes a label with this value, or
    None: there is no such label."""
    is_not = wanted.startswith("!")
    listed = re.fullmatch(r"in\((.*)\)", wanted.removeprefix("!").strip())
    values = [one.strip() for one in listed[1].split(",")] if listed else [wanted.removeprefix("!")]
    return (value in values) != is_not


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """Where demands go, one after the other. `homes` are the nodes of those that fit, by name; `left` is what
    the nodes have left beside them; `lacking` found no place."""

    homes: dict[str, str]
    left: tuple[Node, ...]
    lacking: tuple[WorkerDemand, ...]


def plan(
    demands: Iterable[WorkerDemand], nodes: Sequence[Node], there: Mapping[str, Iterable[str]]
) -> NodeAssignment:
    """Each demand goes to the node with the fewest of its kind, then with the fewest of all. `there` has the
    nodes where those of each kind are already, once for each."""
    left = {node.id: node for node in nodes}
    counts = {kind: Counter(ids) for kind, ids in there.items()}
    homes: dict[str, str] = {}
    lacking: list[WorkerDemand] = []
    for demand in demands:
        same = counts.setdefault(demand.kind, Counter())
        fitting = [node for node in left.values() if node.holds(demand)]
        if not fitting:
            lacking.append(demand)
            continue
        taken = sum(counts.values(), Counter[str]())
        home = min(fitting, key=lambda node: (same[node.id], taken[node.id]))
        left[home.id] = home.without(demand)
        same[home.id] += 1
        homes[demand.name] = home.id
    return NodeAssignment(homes, tuple(left.values()), tuple(lacking))


def missing(demands: Iterable[WorkerDemand], nodes: Sequence[Node]) -> str | None:
    """What the first demand lacks that finds no place beside the others, in one line; None when all have
    one."""
    places = plan(demands, nodes, {})
    if not places.lacking:
        return None
    first, *others = places.lacking
    more = f" (and {len(others)} more with it)" if others else ""
    return (
        f"{first}{more}, and the Ray cluster has no such place: {_told(first, places.left)}. "
        "Add a node, or lower what these workers ask for"
    )


def _told(demand: WorkerDemand, nodes: Sequence[Node]) -> str:
    """The nodes that come closest first: those with the labels, and of these the emptiest."""
    if not nodes:
        return "it has no node"

    def order(node: Node) -> tuple[bool, list[float]]:
        return not node.has_labels_of(demand), [-node.free.get(name, 0.0) for name in demand.each]

    more = f"; and {len(nodes) - NODES_TOLD_MAX} more nodes" if len(nodes) > NODES_TOLD_MAX else ""
    return "; ".join(node.told(demand) for node in sorted(nodes, key=order)[:NODES_TOLD_MAX]) + more
