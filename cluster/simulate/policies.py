"""Placement policies of other systems, to compare ours with. Pure, except for random choices.

A policy sees the current state of the workers, without the delay of a heartbeat. It always sends a
prompt to a prefill worker. Streams go to the decode worker with the least KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Protocol

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved, WorkerInfo


class WorkerView(Protocol):
    """A worker as a policy sees it."""

    info: WorkerInfo

    @property
    def wait_s(self) -> float:
        """The time until all queued and running work is computed."""
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


POLICIES = ("random", "round-robin", "least-load", "prefix-affinity", "min-ttft", "formula")
OURS = "ours"


def make_policy(name: str, rng: Random) -> Policy:
    """Return the policy with this name. Raises UnknownPolicy."""
    match name:
        case "random":
            return AtRandom(rng)
        case "round-robin":
            return RoundRobin()
        case "least-load":
            return LeastLoad(rng)
        case "prefix-affinity":
            return PrefixAffinity(rng)
        case "min-ttft":
            return MinTtft(rng)
        case "formula":
            return Formula(rng)
        case _:
            raise UnknownPolicy(f"--policy {name}: the policies are {', '.join((OURS, *POLICIES))}")


def _least(workers: Sequence[WorkerView], score: Callable[[WorkerView], float], rng: Random) -> WorkerView:
    return min(workers, key=lambda worker: (score(worker), rng.random()))


def _ttft_s(worker: WorkerView, request: PlacementRequest) -> float:
    start = worker.usable(request.keys) * worker.info.page_tokens
    return worker.wait_s + worker.prefill_s(start, request.num_tokens)


def _duplicate_s(worker: WorkerView, request: PlacementRequest) -> float:
    """Return the time to compute missing pages, without checkpoints: the first visit makes those."""
    return worker.prefill_s(worker.expected(request.keys) * worker.info.page_tokens, request.num_tokens)
