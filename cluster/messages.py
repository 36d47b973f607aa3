"""Everything that edge, router, worker and supervisor say to each other, but for what the engine defines."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from tidemill.workers.messages import Role, WorkerId, WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request as the router sees it. `keys` are the cut keys of its full pages below the last token, or of
    those that may be restored if the `whole` rest is to be computed where it is answered."""

    request_id: str
    keys: tuple[bytes, ...]
    num_tokens: int
    max_new_tokens: int
    avoid: frozenset[WorkerId] = field(default_factory=frozenset[WorkerId])  # those that it was lost on
    wait_s_max: float = 60.0
    tenant: str = ""
    ttft_s_max: float | None = None  # None: as long as the server lets it wait; inf: it was taken before
    content_hash: bytes = b""  # names what is asked, whatever its request_id
    recompute_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The workers of one attempt. `prefill` is None when the decode worker computes what is missing itself;
    `gap_tokens_max` is how much it may compute (None: all of it)."""

    decode: WorkerId
    decode_address: str
    prefill: WorkerId | None = None
    prefill_address: str = ""
    gap_tokens_max: int | None = None
    predicted_s: float = 0.0  # until the first token; 0: nobody knows how fast the workers are
    queue_offset_s: float = 0.0  # see Request


SetBy = Literal["operator", "broker", "share"]
"""Who says what a worker's budget is: a person, the broker, or the share that it was started with."""


class SetBudget(NamedTuple):
    """The budget that a worker shall have, and who says so."""

    by: SetBy
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One row of `tidemill status`. state: ready or draining; a silent worker has no row.

    `set_bytes` is the budget that it shall have; `load.budget_bytes`, the one it has, follows as others give
    memory back.
    """

    info: WorkerInfo
    load: WorkerLoad
    state: str
    heard_ago_s: float
    restorable_depths: int
    set_by: SetBy = "share"
    set_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    workers: tuple[WorkerStatus, ...]

    def with_budgets(self, told: Mapping[str, SetBudget]) -> "FleetStatus":
        """The same, with what another router says of their budgets."""
        return FleetStatus(
            workers=tuple(
                replace(worker, set_by=said.by, set_bytes=said.num_bytes)
                if (said := told.get(worker.info.name))
                else worker
                for worker in self.workers
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleScale:
    """How many workers of a role there are to be. `starting` are those of them that are not heard yet,
    `leaving` others that go when they have handed their work over. Load decides between `least` and `most`,
    nothing but people where these are None."""

    role: Role
    workers: int
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Totals: answers that began, those of them that began too late, and requests that were refused."""

    answered: int = 0
    late: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many workers of a role there may be."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """How long a fleet is watched before it changes."""

    look_s: float = 2.0  # between two looks
    up_s: float = 30.0  # of load, before there are more
    down_s: float = 300.0  # of calm, before there are fewer
    cool_s: float = 60.0  # after there were fewer, before there are still fewer
    start_s_max: float = 120.0  # a new worker is waited for, before there are still more
    drain_s: float = 120.0  # in which the queue shall be worked off


TTFT_S_MAX = 60.0
"""As long as a client waits for a first token, unless the server was told otherwise."""
