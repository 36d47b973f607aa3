"""What the edge needs from the cluster: one served model, its streams, and the state of the fleet."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from tidemill.workers.messages import Piece, Request, Role, WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as clients name and use it. `max_model_len` counts prompt and output tokens together: the
    smaller of the model's own limit and of what one worker's memory can hold."""

    name: str
    folder: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_s: int  # unix time
    aliases: tuple[str, ...] = ()  # other names that clients may use

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


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
                replace(one, set_by=said.by, set_bytes=said.num_bytes)
                if (said := told.get(one.info.name))
                else one
                for one in self.workers
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


class Service(Protocol):
    model: ServedModel

    def generate(self, request: Request) -> AsyncGenerator[Piece]:
        """Tokens of one request until its finish; closing the generator cancels it. Raises Unserved."""
        ...

    async def status(self) -> FleetStatus: ...

    def reset_prefix_cache(self) -> None:
        """Requests from now on find nothing that was kept before."""
        ...

    async def set_budget(self, worker: str, budget_bytes: int | None) -> None:
        """Give a worker this budget, by its name; None leaves it to the broker. Raises RequestError,
        Unserved."""
        ...

    async def drain(self, worker: str, *, drain: bool, force: bool = False) -> None:
        """Have a worker hand everything over, or take work again; by `force` also if no other does its work.
        Raises RequestError, Unserved."""
        ...

    async def set_role(self, worker: str, role: Role) -> None:
        """Raises RequestError, Unserved."""
        ...

    async def scale(self, counts: Mapping[Role, int], *, pending: bool = False) -> str | None:
        """So many workers of these roles there shall be; `pending`: also if they have to wait for a place in
        the cluster, and then the answer is what it lacks. Raises RequestError, Unserved."""
        ...

    async def roles(self) -> tuple[RoleScale, ...]:
        """Raises Unserved."""
        ...
