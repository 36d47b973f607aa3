"""The memory of workers over HTTP, and the body that sets a worker's budget."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from tidemill.cluster.edge.requests.usage import Json
from tidemill.cluster.messages import FleetStatus, WorkerStatus
from tidemill.kvstore.sizes import parse_bytes

BUDGET_BYTES_MAX = (1 << 63) - 1


def _size(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


class BudgetBody(BaseModel, strict=True, extra="forbid"):
    """A worker's name and its new budget: a number of bytes, a size such as 512MiB, or null to return it to
    the broker."""

    worker: Annotated[str, Field(max_length=256)]
    budget: Annotated[int | None, Field(ge=1, le=BUDGET_BYTES_MAX), BeforeValidator(_size)]


def memory_of(fleets: Mapping[str, FleetStatus]) -> Json:
    """Return the memory of every worker; `fleets` by model."""
    return {"workers": [_row(worker) for status in fleets.values() for worker in status.workers]}


def _row(worker: WorkerStatus) -> Json:
    """Return a row; `set_bytes` is the budget set for the worker, `budget_bytes` its present one."""
    return {
        "name": worker.info.name,
        "role": worker.info.role,
        "device": worker.info.device,
        "budget_bytes": worker.load.budget_bytes,
        "floor_bytes": worker.info.memory_floor_bytes,
        "max_bytes": worker.info.memory_max_bytes,
        "share_bytes": worker.info.memory_bytes,
        "wanted_bytes": worker.load.wanted_bytes,
        "set_by": worker.set_by,
        "set_bytes": worker.set_bytes,
        "memory": worker.load.memory,
    }
