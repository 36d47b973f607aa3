"""Factories for worker infos, heartbeats and placement requests. Tests set only the fields that matter."""

from dataclasses import fields, replace
from typing import Any

from tidemill.cluster.messages import PlacementRequest
from tidemill.workers.messages import Announcement, Heartbeat, Role, WorkerId, WorkerInfo, WorkerLoad

LOAD_FIELDS = {field.name for field in fields(WorkerLoad)}


def worker_info(worker: str = "decode-0", role: Role = "decode", **overrides: Any) -> WorkerInfo:  # noqa: ANN401
    """Return the info of a worker. `worker` is an id, or a name, which stands for its incarnation 1."""
    name, _, incarnation = worker.partition(".")
    worker_id = WorkerId(f"{name}.{incarnation or 1}")
    info = WorkerInfo(worker=worker_id, name=name, role=role, address=f"at:{worker_id}", pid=1, node="n")
    return replace(info, **overrides)


def heartbeat(
    worker: str | WorkerInfo = "decode-0",
    role: Role = "decode",
    added: tuple[bytes, ...] = (),
    *,
    sequence: int = 0,
    announcement: Announcement | None = None,
    draining: bool = False,
    **overrides: Any,  # noqa: ANN401
) -> Heartbeat:
    """Return a heartbeat that announces the keys `added`. Overrides are fields of its info or its load."""
    load = {name: overrides.pop(name) for name in LOAD_FIELDS & overrides.keys()}
    info = worker_info(worker, role) if isinstance(worker, str) else worker
    return Heartbeat(
        info=replace(info, **overrides),
        sequence=sequence,
        load=WorkerLoad(**load),
        announcement=announcement or Announcement(added=added, full=not sequence),
        draining=draining,
    )


def placement_request(num_tokens: int = 10, **overrides: Any) -> PlacementRequest:  # noqa: ANN401
    request = PlacementRequest(request_id="r", keys=(), num_tokens=num_tokens, max_new_tokens=1)
    return replace(request, **overrides)
