"""Placement policies of other systems, to compare ours with. Pure, except for random choices.

A policy sees the current state of the workers, without the delay of a heartbeat, and also the pages
that queued prompts will have. It always sends a prompt to a prefill worker. Streams go to the decode
worker with the least KV. Policies with the name of their owner follow its published rule with its
defaults; docs/simulate.md has the sources and what is left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from random import Random
from statistics import fmean, pstdev
from typing import Protocol

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved, WorkerId, WorkerInfo


class WorkerView(Protocol):
    info: WorkerInfo

    @property
    def wait_s(self) -> float:
        """The time until all queued and running work is computed."""
        ...

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens that it has to compute."""
        ...

    @property
    def rows(self) -> int:
        """The number of waiting and running requests."""
        ...

    @property
    def kv_tokens(self) -> int:
        """The tokens of KV that its requests hold."""
        ...

    def expected(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first pages it has, or will have when its queue is computed."""
        ...

    def usable(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first pages it need not compute when it starts the prompt."""
        ...

    def prefill_s(self, start: int, end: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A prompt to compute, the workers to choose from, the time in seconds, and the dice."""

    request: PlacementRequest
    workers: Sequence[WorkerView]
    now_s: float
    rng: Random

    def least(self, cost: Callable[[WorkerView], float], among: Sequence[WorkerView] = ()) -> WorkerView:
        """Return the worker with the least cost, by default of all. Ties are broken at random."""
        return min(among or self.workers, key=lambda worker: (cost(worker), self.rng.random()))

    def depth(self, worker: WorkerView) -> int:
        return worker.expected(self.request.keys)

    def ttft_s(self, worker: WorkerView) -> float:
        start = worker.usable(self.request.keys) * worker.info.page_tokens
        return worker.wait_s + worker.prefill_s(start, self.request.num_tokens)

    def duplicate_s(self, worker: WorkerView) -> float:
        """Return the time to compute missing pages, without checkpoints: the first visit makes those."""
        return worker.prefill_s(self.depth(worker) * worker.info.page_tokens, self.request.num_tokens)


Policy = Callable[[Choice], WorkerView]


def at_random(among: Choice) -> WorkerView:
    return among.rng.choice(among.workers)


@dataclass(slots=True)
class RoundRobin:
    count: int = -1

    def __call__(self, among: Choice) -> WorkerView:
        self.count += 1
        return among.workers[self.count % len(among.workers)]


def least_load(among: Choice) -> WorkerView:
    """Choose the worker with the least queued work."""
    return among.least(lambda worker: worker.wait_s)


def prefix_affinity(among: Choice, *, match_min: float = 0.1, rows_max: int = 8) -> WorkerView:
    """Choose the worker that holds most of the prompt, if that is at least the share `match_min`.

    It may have at most `rows_max` requests more than the idlest worker. Otherwise the worker with
    the least queued work is chosen.
    """
    idlest = min(worker.rows for worker in among.workers)
    candidates = [worker for worker in among.workers if worker.rows - idlest <= rows_max]
    depths = [(among.depth(worker), -worker.wait_s, index) for index, worker in enumerate(candidates)]
    depth, _, best = max(depths)
    if depth >= max(1.0, match_min * len(among.request.keys)):
        return candidates[best]
    return least_load(among)


def min_ttft(among: Choice) -> WorkerView:
    """Choose the worker with the earliest first token (greedy)."""
    return among.least(among.ttft_s)


def dynamo(among: Choice, *, overlap_weight: float = 1.0) -> WorkerView:
    """Choose the least sum of blocks to compute, with those of the prompt, and blocks that generate."""

    def blocks(worker: WorkerView) -> float:
        size = worker.info.page_tokens
        missing = among.request.num_tokens - among.depth(worker) * size
        return (overlap_weight * (worker.queued_tokens + missing) + worker.kv_tokens) / size

    return among.least(blocks)


@dataclass(slots=True)
class Sglang:
    """`cache_aware`: the shortest queue while queues differ too much. Otherwise the worker that has most of
    the prompt, if that is more than a share of it, or else the one with the smallest tree of prompts."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    trees: Counter[WorkerId] = field(default_factory=Counter[WorkerId])  # pages that were sent to it

    def __call__(self, among: Choice) -> WorkerView:
        loads, num_keys = [worker.rows for worker in among.workers], len(among.request.keys)
        least, most = min(loads), max(loads)
        if most - least > self.balance_abs_threshold and most > least * self.balance_rel_threshold:
            chosen = among.least(lambda worker: worker.rows)
        elif max(map(among.depth, among.workers)) > self.cache_threshold * max(1, num_keys):
            chosen = among.least(lambda worker: -among.depth(worker))
        else:
            chosen = among.least(lambda worker: self.trees[worker.info.worker])
        self.trees[chosen.info.worker] += num_keys - among.depth(chosen)
        return chosen


def aibrix(among: Choice, *, imbalance_max: int = 8, deviation_factor: float = 1.0) -> WorkerView:
    """Choose as `prefix-cache` does: the fewest requests while their numbers differ too much. Otherwise the
    worker with the longest prefix among those with few enough requests, or else the fewest requests again."""
    loads = [worker.rows for worker in among.workers]
    bound = fmean(loads) + deviation_factor * pstdev(loads)
    matching = [worker for worker in among.workers if among.depth(worker) > 0 and worker.rows <= bound]
    longest: list[WorkerView] = []
    if max(loads) - min(loads) <= imbalance_max and matching:
        deepest = max(map(among.depth, matching))
        longest = [worker for worker in matching if among.depth(worker) == deepest]
    return among.least(lambda worker: worker.rows, longest)


def llm_d(among: Choice, *, prefix_weight: float = 3.0, queue_weight: float = 2.0) -> WorkerView:
    """Choose the highest sum of weighted scores from 0 to 1: the share of the prompt that a worker has, and
    its queue beside the others."""
    least, most = (extreme(worker.rows for worker in among.workers) for extreme in (min, max))

    def loss(worker: WorkerView) -> float:
        share = among.depth(worker) / max(1, len(among.request.keys))
        queue = (most - worker.rows) / (most - least) if most > least else 1.0
        return -prefix_weight * share - queue_weight * queue

    return among.least(loss)


@dataclass(slots=True)
class Formula:
    """The formula that placement started from: the time to first token, plus `kappa` times
    duplicate work.

    The work is duplicate when a prompt leaves the worker with its prefix. `kappa` is the cost of
    work to later requests. It grows with the load `rho` of the workers like the length of a queue.
    """

    kappa_max: float = 8.0
    tau_s: float = 10.0
    rho: float = 0.0
    at_s: float = 0.0

    def __call__(self, among: Choice) -> WorkerView:
        self.rho *= exp((self.at_s - among.now_s) / self.tau_s)
        self.at_s = among.now_s
        kappa = min(self.kappa_max, self.rho / (1 - self.rho)) if self.rho < 1 else self.kappa_max
        best = among.least(lambda worker: among.ttft_s(worker) + kappa * among.duplicate_s(worker))
        self.rho += (among.ttft_s(best) - best.wait_s) / (self.tau_s * len(among.workers))
        return best


class UnknownPolicy(TidemillError):
    """No policy has this name."""


_POLICIES: dict[str, Policy | type[RoundRobin | Sglang | Formula]] = {
    "random": at_random,
    "round-robin": RoundRobin,
    "least-load": least_load,
    "prefix-affinity": prefix_affinity,
    "min-ttft": min_ttft,
    "formula": Formula,
    "dynamo": dynamo,
    "sglang": Sglang,
    "aibrix": aibrix,
    "llm-d": llm_d,
    "conductor": min_ttft,  # of Mooncake
}
POLICIES = tuple(_POLICIES)
OURS = "ours"


class PolicyRouter:
    """A router that applies the policy of a name to prefill workers."""

    def __init__(
        self, name: str, workers: Sequence[WorkerView], clock: Callable[[], float], seed: int
    ) -> None:
        """Raises UnknownPolicy."""
        if name not in _POLICIES:
            raise UnknownPolicy(f"--policy {name}: the policies are {', '.join((OURS, *POLICIES))}")
        found = _POLICIES[name]
        self._policy: Policy = found() if isinstance(found, type) else found
        self._prefill = [worker for worker in workers if worker.info.role != "decode"]
        self._decode = [worker for worker in workers if worker.info.role != "prefill"]
        self._clock = clock
        self._rng = Random(seed)  # noqa: S311  a policy's dice

    async def place(self, request: PlacementRequest) -> Route:
        """Raises Unserved without workers of both kinds."""
        if not self._prefill or not self._decode:
            raise Unserved("a policy needs prefill and decode workers")
        decode = min(self._decode, key=lambda worker: worker.kv_tokens)
        among = Choice(request, self._prefill, self._clock(), self._rng)
        prefill = self._policy(among)
        return Route(
            decode=decode.info.worker,
            decode_address=decode.info.address,
            prefill=prefill.info.worker,
            prefill_address=prefill.info.address,
            gap_tokens_max=2 * decode.info.page_tokens,
            predicted_s=among.ttft_s(prefill),
        )
