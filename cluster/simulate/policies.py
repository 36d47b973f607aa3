"""Placement as others do it, to compare ours with: who computes a prompt. Pure, but for the random ones.

Each sees the workers as they are at this moment, without the delay of a heartbeat, and its prompts go to a
prefill worker always; streams go to the decode worker with the least KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Protocol

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved, WorkerId, WorkerInfo


class WorkerView(Protocol):
    """A worker as a policy sees it."""

    info: WorkerInfo

    @property
    def wait_s(self) -> float:
        """Until all that is queued and runs is computed."""
        ...

    @property
    def rows(self) -> int:
        """Requests that wait or run."""
        ...

    @property
    def kv_tokens(self) -> int:
        """That its requests hold."""
        ...

    def expected(self, keys: Sequence[bytes]) -> int:
        """How many of the first pages are here, or will be when what is queued is computed."""
        ...

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many of the first pages it needs not compute when the prompt's turn comes."""
        ...

    def prefill_s(self, start: int, end: int) -> float: ...


Policy = Callable[[PlacementRequest, Sequence[WorkerView], float], WorkerView]
"""Who computes the prompt: of these, at this time."""


class AtRandom:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, ask: PlacementRequest, seats: Sequence[WorkerView], now_s: float) -> WorkerView:
        del ask, now_s
        return self._rng.choice(seats)


class RoundRobin:
    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, ask: PlacementRequest, seats: Sequence[WorkerView], now_s: float) -> WorkerView:
        del ask, now_s
        self._turn += 1
        return seats[self._turn % len(seats)]


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Where the least is queued. Here and below, ties are broken by chance."""

    rng: Random

    def __call__(self, ask: PlacementRequest, seats: Sequence[WorkerView], now_s: float) -> WorkerView:
        del ask, now_s
        return _least(seats, lambda seat: seat.wait_s, self.rng)


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """The worker that holds most of the prompt, if that is at least `match_min` of it and if it has at most
    `rows_max` requests more than the idlest one; else the one with the least work."""

    rng: Random
    match_min: float = 0.1
    rows_max: int = 8

    def __call__(self, ask: PlacementRequest, seats: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        idlest = min(seat.rows for seat in seats)
        near = [seat for seat in seats if seat.rows - idlest <= self.rows_max]
        depths = [(seat.expected(ask.keys), -seat.wait_s, index) for index, seat in enumerate(near)]
        depth, _, best = max(depths)
        if depth >= max(1.0, self.match_min * len(ask.keys)):
            return near[best]
        return _least(seats, lambda seat: seat.wait_s, self.rng)


@dataclass(frozen=True, slots=True)
class MinTtft:
    """Greedy: where the first token comes soonest."""

    rng: Random

    def __call__(self, ask: PlacementRequest, seats: Sequence[WorkerView], now_s: float) -> WorkerView:
        del now_s
        return _least(seats, lambda seat: _ttft_s(seat, ask), self.rng)


@dataclass(slots=True)
class Formula:
    """The formula that placement started from: the time to the first token, and `kappa` times the work that
    is done twice when the prompt leaves its family. `kappa` is what work costs those who come later: it grows
    with the load `rho` of the workers, as a queue does."""

    rng: Random
    kappa_max: float = 8.0
    tau_s: float = 10.0
    rho: float = 0.0
    at_s: float = 0.0

    def __call__(self, ask: PlacementRequest, seats: Sequence[WorkerView], now_s: float) -> WorkerView:
        self.rho *= exp((self.at_s - now_s) / self.tau_s)
        self.at_s = now_s
        kappa = min(self.kappa_max, self.rho / (1 - self.rho)) if self.rho < 1 else self.kappa_max
        best = _least(seats, lambda seat: _ttft_s(seat, ask) + kappa * _leaving_s(seat, ask), self.rng)
        self.rho += (_ttft_s(best, ask) - best.wait_s) / (self.tau_s * len(seats))
        return best


class PolicyRouter:
    """A router that asks a policy. Raises Unserved without workers of both kinds."""

    def __init__(self, policy: Policy, seats: Sequence[WorkerView], clock: Callable[[], float]) -> None:
        self._policy = policy
        self._prefill = [seat for seat in seats if seat.info.role != "decode"]
        self._decode = [seat for seat in seats if seat.info.role != "prefill"]
        self._clock = clock

    async def place(self, ask: PlacementRequest) -> Route:
        if not self._prefill or not self._decode:
            raise Unserved("a policy needs prefill and decode workers")
        decode = min(self._decode, key=lambda seat: seat.kv_tokens)
        prefill = self._policy(ask, self._prefill, self._clock())
        return Route(
            decode=decode.info.worker,
            decode_address=decode.info.address,
            prefill=prefill.info.worker,
            prefill_address=prefill.info.address,
            gap_tokens_max=2 * decode.info.page_tokens,
            predicted_s=_ttft_s(prefill, ask),
        )

    async def report_lost(self, worker: WorkerId) -> None:
        """Nobody is lost here."""


class UnknownPolicy(TidemillError):
    """No policy has this name."""


POLICIES = ("random", "round-robin", "least-load", "prefix-affinity", "min-ttft", "formula")
OURS = "ours"


def policy_of(name: str, rng: Random) -> Policy:
    """Raises UnknownPolicy."""
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
            raise UnknownPolicy(f"--policy {name}: there are {', '.join((OURS, *POLICIES))}")


def _least(seats: Sequence[WorkerView], score: Callable[[WorkerView], float], rng: Random) -> WorkerView:
    return min(seats, key=lambda seat: (score(seat), rng.random()))


def _ttft_s(seat: WorkerView, ask: PlacementRequest) -> float:
    start = seat.usable(ask.keys) * seat.info.page_tokens
    return seat.wait_s + seat.prefill_s(start, ask.num_tokens)


def _leaving_s(seat: WorkerView, ask: PlacementRequest) -> float:
    """To compute what is not here at all; checkpoints aside, for the first visit without one makes it."""
    return seat.prefill_s(seat.expected(ask.keys) * seat.info.page_tokens, ask.num_tokens)
