"""Messages between edge, router, workers and supervisor, except those that the engine defines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from tidemill.workers.messages import (
    COUNT_MAX,
    Count,
    Finite,
    Integer,
    Role,
    Seconds,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from tidemill.workers.pickled_by_name import PickledByName


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request for a route.

    `keys` are the cut keys of the full pages below the last token. With `recompute_all` they end
    where the missing prompt logprobs begin, and one worker computes the rest. With `pools` one worker
    computes all of the prompt, which need not decode.
    """

    request_id: str
    keys: tuple[bytes, ...]
    num_tokens: Count
    max_new_tokens: Count
    avoid: frozenset[WorkerId] = field(default_factory=frozenset[WorkerId])  # failed attempts
    wait_s_max: Annotated[float, Meta(ge=0, le=COUNT_MAX)] = 60.0
    tenant: str = ""
    ttft_s_max: Seconds | None = None  # the client's deadline; None: the server's
    content_hash: bytes = b""  # equal for equal requests; it does not cover request_id
    recompute_all: bool = False
    pools: bool = False
    resumed: bool = False  # it was accepted before: it has no deadline and goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The workers of one attempt. Without a `prefill` worker the decode worker computes the prompt. With one
    it computes at most `gap_tokens_max` tokens of it (None: any number). The prompt has its first
    `shared_pages` pages in common with one that was placed lately. Of the workers that do not compute it,
    `elsewhere` can restore the most of it: `elsewhere_pages`."""

    decode: WorkerId
    decode_address: str
    prefill: WorkerId | None = None
    prefill_address: str = ""
    gap_tokens_max: Count | None = None
    predicted_s: Seconds = 0.0  # time to first token; 0: no worker has measured its speed
    queue_offset_s: Finite = 0.0  # see Request
    shared_pages: Count = 0
    elsewhere: WorkerId | None = None
    elsewhere_pages: Count = 0


SetBy = Literal["operator", "broker", "share"]
"""The origin of a budget: an operator, the broker, or the share that the worker started with."""


class BudgetTarget(NamedTuple):
    """A target for the memory budget of a worker, and its origin."""

    by: SetBy
    num_bytes: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One row of `tidemill status`. The state is "ready" or "draining"; a silent worker has no row.

    `set_bytes` is the target for its budget. `load.budget_bytes`, the current budget, follows it as
    other workers give memory back.
    """

    info: WorkerInfo
    load: WorkerLoad
    state: str
    heard_ago_s: float
    restorable_depths: Count
    set_by: SetBy = "share"
    set_bytes: Integer = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The workers of a fleet, the number of requests that wait at its router for one to start, and the
    numbers of failed rounds of the router, and of the supervisor if the router knows it."""

    workers: tuple[WorkerStatus, ...]
    held: Count = 0
    failed_rounds: Count = 0
    supervisor_failed_rounds: Count | None = None

    def with_budgets(self, budgets: Mapping[str, BudgetTarget]) -> "FleetStatus":
        """Replace the budget targets by those of another router, given by worker name."""
        return replace(
            self,
            workers=tuple(
                replace(worker, set_by=budget.by, set_bytes=budget.num_bytes)
                if (budget := budgets.get(worker.info.name))
                else worker
                for worker in self.workers
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleScale:
    """The target number of workers of a role.

    `starting` are the workers among them that have sent no heartbeat yet. `leaving` are further
    workers that exit after they have handed their work over. The autoscaler keeps the number
    between `least` and `most`; where these are None, only an operator changes it.
    """

    role: Role
    workers: Count
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    least: Count | None = None
    most: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """An edge with a token, or a revoked certificate without one (an empty name)."""

    name: str
    state: Literal["waits", "joined", "expired", "revoked"]
    serials: Mapping[str, float]  # the ends of its certificates in unix time
    token_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersAnswer:
    """All edges that may join or have joined, and the new token with the addresses to join at, if one was
    ordered."""

    edges: tuple[MemberStatus, ...]
    token: str = ""
    join: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A signing request in PEM, with the parts of a token; without them it renews the certificate of the
    caller."""

    request: bytes = b""
    token: str = ""
    secret: str = ""
    serial: str = ""  # of the caller's certificate, as the process that took the connection found


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """The certificate of the authority, and for a request a certificate and the addresses of routers, or the
    reason for the refusal."""

    ca: bytes = b""
    certificate: bytes = b""
    routers: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Totals: answers started, those of them started too late, and requests refused."""

    answered: Integer = 0
    late: Integer = 0
    refused: Integer = 0

    def __add__(self, other: "Misses") -> "Misses":
        return Misses(
            answered=self.answered + other.answered,
            late=self.late + other.late,
            refused=self.refused + other.refused,
        )

    def __sub__(self, earlier: "Misses") -> "Misses":
        return Misses(
            answered=self.answered - earlier.answered,
            late=self.late - earlier.late,
            refused=self.refused - earlier.refused,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(PickledByName):
    """The least and the largest number of workers of a role."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis(PickledByName):
    """The times that the autoscaler waits before it changes a fleet."""

    look_s: float = 2.0  # between two samples of the load
    up_s: float = 30.0  # of high load before workers are added
    down_s: float = 300.0  # of low load before a worker is removed
    cool_s: float = 60.0  # between two removals
    start_s_max: float = 120.0  # for a new worker to start, before more are added
    drain_s: float = 120.0  # in which the workers should empty the queue
    zero_s: float = math.inf  # without requests before all workers end
