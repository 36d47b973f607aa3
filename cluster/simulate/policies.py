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
    """A worker as a policy sees it."""

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


Policy = Callable[[PlacementRequest, Sequence[WorkerView], float], WorkerView]
"""A choice of the worker that computes a prompt, among these, at this time in seconds."""


class AtRandom:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del request, now_s
        return self._rng.choice(workers)


class RoundRobin:
    def __init__(self) -> None:
        self._count = -1

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del request, now_s
        self._count += 1
        return workers[self._count % len(workers)]


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The worker with the least queued work. Here and below, ties are broken at random."""

    rng: Random

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del request, now_s
        return _least(workers, lambda worker: worker.wait_s, self.rng)


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """The worker that holds most of the prompt, if that is at least the share `match_min`.

    It may have at most `rows_max` requests more than the idlest worker. Otherwise the worker with
    the least queued work is chosen.
    """

    rng: Random
    match_min: float = 0.1
    rows_max: int = 8

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        idlest = min(worker.rows for worker in workers)
        candidates = [worker for worker in workers if worker.rows - idlest <= self.rows_max]
        depths = [
            (worker.expected(request.keys), -worker.wait_s, index) for index, worker in enumerate(candidates)
        ]
        depth, _, best = max(depths)
        if depth >= max(1.0, self.match_min * len(request.keys)):
            return candidates[best]
        return _least(workers, lambda worker: worker.wait_s, self.rng)


@dataclass(frozen=True, slots=True)
class MinTtft:
    """The worker with the earliest first token (greedy)."""

    rng: Random

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        return _least(workers, lambda worker: _ttft_s(worker, request), self.rng)


@dataclass(frozen=True, slots=True)
class Dynamo:
    """The least sum of blocks to compute, with those of the prompt, and blocks that generate."""

    rng: Random
    overlap_weight: float = 1.0

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s

        def blocks(worker: WorkerView) -> float:
            size = worker.info.page_tokens
            missing = request.num_tokens - worker.expected(request.keys) * size
            return (self.overlap_weight * (worker.queued_tokens + missing) + worker.kv_tokens) / size

        return _least(workers, blocks, self.rng)


@dataclass(slots=True)
class Sglang:
    """`cache_aware`: the shortest queue while queues differ too much. Otherwise the worker that has most of
    the prompt, if that is more than a share of it, or else the one with the smallest tree of prompts."""

    rng: Random
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    trees: Counter[WorkerId] = field(default_factory=Counter[WorkerId])  # pages that were sent to it

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        loads = [worker.rows for worker in workers]
        least, most = min(loads), max(loads)
        deepest = max(worker.expected(request.keys) for worker in workers)
        if most - least > self.balance_abs_threshold and most > least * self.balance_rel_threshold:
            chosen = _least(workers, lambda worker: worker.rows, self.rng)
        elif deepest > self.cache_threshold * max(1, len(request.keys)):
            chosen = _least(workers, lambda worker: -worker.expected(request.keys), self.rng)
        else:
            chosen = _least(workers, lambda worker: self.trees[worker.info.worker], self.rng)
        self.trees[chosen.info.worker] += len(request.keys) - chosen.expected(request.keys)
        return chosen


@dataclass(frozen=True, slots=True)
class Aibrix:
    """`prefix-cache`: the fewest requests while their numbers differ too much. Otherwise the worker with the
    longest prefix among those with few enough requests, or else the fewest requests again."""

    rng: Random
    imbalance_max: int = 8
    deviation_factor: float = 1.0

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        loads = [worker.rows for worker in workers]
        bound = fmean(loads) + self.deviation_factor * pstdev(loads)
        matching = [
            worker for worker in workers if worker.expected(request.keys) > 0 and worker.rows <= bound
        ]
        if max(loads) - min(loads) > self.imbalance_max or not matching:
            return _least(workers, lambda worker: worker.rows, self.rng)
        deepest = max(worker.expected(request.keys) for worker in matching)
        longest = [worker for worker in matching if worker.expected(request.keys) == deepest]
        return _least(longest, lambda worker: worker.rows, self.rng)


@dataclass(frozen=True, slots=True)
class LlmD:
    """The highest sum of weighted scores from 0 to 1: the share of the prompt that a worker has, and its
    queue beside the others."""

    rng: Random
    prefix_weight: float = 3.0
    queue_weight: float = 2.0

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        least, most = (extreme(worker.rows for worker in workers) for extreme in (min, max))

        def loss(worker: WorkerView) -> float:
            share = worker.expected(request.keys) / max(1, len(request.keys))
            queue = (most - worker.rows) / (most - least) if most > least else 1.0
            return -self.prefix_weight * share - self.queue_weight * queue

        return _least(workers, loss, self.rng)


@dataclass(slots=True)
class Formula:
    """The formula that placement started from: the time to first token, plus `kappa` times
    duplicate work.

    The work is duplicate when a prompt leaves the worker with its prefix. `kappa` is the cost of
    work to later requests. It grows with the load `rho` of the workers like the length of a queue.
    """

    rng: Random
    kappa_max: float = 8.0
    tau_s: float = 10.0
    rho: float = 0.0
    at_s: float = 0.0

    def __call__(self, request: PlacementRequest, workers: Sequence[WorkerView], now_s: float) -> WorkerView:
        self.rho *= exp((self.at_s - now_s) / self.tau_s)
        self.at_s = now_s
        kappa = min(self.kappa_max, self.rho / (1 - self.rho)) if self.rho < 1 else self.kappa_max
        best = _least(
            workers, lambda worker: _ttft_s(worker, request) + kappa * _duplicate_s(worker, request), self.rng
        )
        self.rho += (_ttft_s(best, request) - best.wait_s) / (self.tau_s * len(workers))
        return best


class PolicyRouter:
    """A router that applies a policy to prefill workers."""

    def __init__(self, policy: Policy, workers: Sequence[WorkerView], clock: Callable[[], float]) -> None:
        self._policy = policy
        self._prefill = [worker for worker in workers if worker.info.role != "decode"]
        self._decode = [worker for worker in workers if worker.info.role != "prefill"]
        self._clock = clock

    async def place(self, request: PlacementRequest) -> Route:
        """Raises Unserved without workers of both kinds."""
        if not self._prefill or not self._decode:
            raise Unserved("a policy needs prefill and decode workers")
        decode = min(self._decode, key=lambda worker: worker.kv_tokens)
        prefill = self._policy(request, self._prefill, self._clock())
        return Route(
            decode=decode.info.worker,
            decode_address=decode.info.address,
            prefill=prefill.info.worker,
            prefill_address=prefill.info.address,
            gap_tokens_max=2 * decode.info.page_tokens,
            predicted_s=_ttft_s(prefill, request),
        )


class UnknownPolicy(TidemillError):
    """No policy has this name."""


_MAKERS: dict[str, Callable[[Random], Policy]] = {
    "random": AtRandom,
    "round-robin": lambda _: RoundRobin(),
    "least-load": LeastLoad,
    "prefix-affinity": PrefixAffinity,
    "min-ttft": MinTtft,
    "formula": Formula,
    "dynamo": Dynamo,
    "sglang": Sglang,
    "aibrix": Aibrix,
    "llm-d": LlmD,
    "conductor": MinTtft,  # of Mooncake
}
POLICIES = tuple(_MAKERS)
OURS = "ours"


def make_policy(name: str, rng: Random) -> Policy:
    """Return the policy with this name. Raises UnknownPolicy."""
    if name not in _MAKERS:
        raise UnknownPolicy(f"--policy {name}: the policies are {', '.join((OURS, *POLICIES))}")
    return _MAKERS[name](rng)


def _least(workers: Sequence[WorkerView], score: Callable[[WorkerView], float], rng: Random) -> WorkerView:
    return min(workers, key=lambda worker: (score(worker), rng.random()))


def _ttft_s(worker: WorkerView, request: PlacementRequest) -> float:
    start = worker.usable(request.keys) * worker.info.page_tokens
    return worker.wait_s + worker.prefill_s(start, request.num_tokens)


def _duplicate_s(worker: WorkerView, request: PlacementRequest) -> float:
    """Return the time to compute missing pages, without checkpoints: the first visit makes those."""
    return worker.prefill_s(worker.expected(request.keys) * worker.info.page_tokens, request.num_tokens)
