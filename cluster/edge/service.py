"""The edge's interface to the cluster: one served model, its streams, and the state of the fleet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidemill.cluster.messages import FleetStatus, Misses
from tidemill.cluster.orders import AnswerT, Order
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import Pooling, Request, StreamPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under the names that clients use. `max_model_len` bounds prompt and output tokens together: the
    lesser of the model's own limit and what one worker's memory can hold. A model without requests may have
    no workers, and then a request waits up to `cold_start_s_max` for them. None: it always has workers."""

    names: tuple[str, ...]
    folder: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pooling: Pooling | None = None  # None: it generates
    created_s: int  # unix time
    prefix_caching: bool = True  # false: no request uses the pages of another
    cold_start_s_max: float | None = None

    @property
    def name(self) -> str:
        return self.names[0]


class EdgeCounts(Protocol):
    """The counts of an edge, for the autoscaler."""

    def misses(self, model: str) -> Misses:
        """Return totals since the start."""
        ...

    def open_requests(self, model: str) -> int:
        """Return the number of requests whose answers are not complete."""
        ...


@dataclass(frozen=True, slots=True)
class ReportingEdge:
    """An edge as the supervisor knows it, and what it counts."""

    id: str
    counts: EdgeCounts


class Service(Protocol):
    model: ServedModel

    async def stream(self, request: Request, emit: Emit[StreamPiece]) -> None:
        """Emit the tokens of one request until its finish. Cancelling this cancels it. Raises Unserved."""
        ...

    async def status(self) -> FleetStatus: ...

    async def release(self, tenant: str, session: str) -> None:
        """Let all workers drop what `tenant` retains under a session. Raises Unserved."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Make new requests find nothing cached before, at every edge. Raises Unserved."""
        ...

    async def carry_out(self, order: Order[AnswerT]) -> AnswerT:
        """Carry out an order of an operator. Raises RequestError, Unserved."""
        ...
