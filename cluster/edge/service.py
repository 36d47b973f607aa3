"""What the edge needs from the cluster: one served model, its streams, and the state of the fleet."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidemill.cluster.messages import FleetStatus, RoleScale
from tidemill.workers.messages import Request, Role, StreamPiece


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


class Scaling(Protocol):
    """The part of the supervisor that adds and removes workers of one fleet."""

    async def scale(self, counts: Mapping[Role, int], *, pending: bool) -> str | None:
        """See Service.scale."""
        ...

    async def roles(self) -> tuple[RoleScale, ...]:
        """Raises Unserved."""
        ...


class Service(Protocol):
    model: ServedModel

    def generate(self, request: Request) -> AsyncGenerator[StreamPiece]:
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
