"""What routers, workers and frontends tell each other about the fleet, as bytes. Pure."""

from collections.abc import Iterable, Mapping
from typing import get_args

from tidemill.cluster.messages import FleetStatus, PlacementRequest, Route, SetBudget, SetBy, WorkerStatus
from tidemill.cluster.rpc.proto import tidemill_pb2 as pb
from tidemill.cluster.rpc.worker_codec import Malformed, parse
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    Ack,
    Announcement,
    Heartbeat,
    MemoryUse,
    Overloaded,
    Poisonous,
    Role,
    Speed,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
_SET_BY: dict[str, SetBy] = {set_by: set_by for set_by in get_args(SetBy)}


def encode_ask(ask: PlacementRequest) -> bytes:
    return pb.PlacementRequest(
        request_id=ask.request_id,
        keys=_keys_to(ask.keys),
        num_tokens=ask.num_tokens,
        max_new_tokens=ask.max_new_tokens,
        avoid=sorted(ask.avoid),
        wait_s_max=ask.wait_s_max,
        tenant=ask.tenant,
        ttft_s_max=ask.ttft_s_max,
        content_hash=ask.content_hash,
        recompute_all=ask.recompute_all,
        resumed=ask.resumed,
    ).SerializeToString()


def decode_ask(data: bytes) -> PlacementRequest:
    """Raises Malformed, as the other decoders here do."""
    message = parse(pb.PlacementRequest(), data)
    return PlacementRequest(
        request_id=message.request_id,
        keys=_keys_from(message.keys),
        num_tokens=message.num_tokens,
        max_new_tokens=message.max_new_tokens,
        avoid=frozenset(WorkerId(worker) for worker in message.avoid),
        wait_s_max=message.wait_s_max,
        tenant=message.tenant,
        ttft_s_max=message.ttft_s_max if message.HasField("ttft_s_max") else None,
        content_hash=message.content_hash,
        recompute_all=message.recompute_all,
        resumed=message.resumed,
    )


Placed = Route | Overloaded | Poisonous
"""What a router answers to an ask, unless it is Unserved."""


def encode_placed(placed: Placed) -> bytes:
    match placed:
        case Route():
            message = pb.Placed(
                route=pb.Route(
                    decode=placed.decode,
                    decode_address=placed.decode_address,
                    prefill=placed.prefill,
                    prefill_address=placed.prefill_address,
                    gap_tokens_max=placed.gap_tokens_max,
                    predicted_s=placed.predicted_s,
                    queue_offset_s=placed.queue_offset_s,
                )
            )
        case Overloaded():
            message = pb.Placed(
                overload=pb.Overload(
                    message=str(placed), predicted_s=placed.predicted_s, retry_after_s=placed.retry_after_s
                )
            )
        case Poisonous():
            message = pb.Placed(poisonous=str(placed))
    return message.SerializeToString()


def decode_placed(data: bytes) -> Placed:
    message = parse(pb.Placed(), data)
    match message.WhichOneof("kind"):
        case "route":
            route = message.route
            return Route(
                decode=WorkerId(route.decode),
                decode_address=route.decode_address,
                prefill=WorkerId(route.prefill) if route.HasField("prefill") else None,
                prefill_address=route.prefill_address,
                gap_tokens_max=route.gap_tokens_max if route.HasField("gap_tokens_max") else None,
                predicted_s=route.predicted_s,
                queue_offset_s=route.queue_offset_s,
            )
        case "overload":
            overload = message.overload
            return Overloaded(
                overload.message, predicted_s=overload.predicted_s, retry_after_s=overload.retry_after_s
            )
        case "poisonous":
            return Poisonous(message.poisonous)
        case _:
            raise Malformed("an answer of no known kind")


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    announcement = heartbeat.announcement
    return pb.Heartbeat(
        info=_info_to(heartbeat.info),
        sequence=heartbeat.sequence,
        load=_load_to(heartbeat.load),
        announcement=pb.Announcement(
            added=_keys_to(announcement.added),
            removed=_keys_to(announcement.removed),
            full=announcement.full,
        ),
        draining=heartbeat.draining,
    ).SerializeToString()


def decode_heartbeat(data: bytes) -> Heartbeat:
    message = parse(pb.Heartbeat(), data)
    return Heartbeat(
        info=_info_from(message.info),
        sequence=message.sequence,
        load=_load_from(message.load),
        announcement=Announcement(
            added=_keys_from(message.announcement.added),
            removed=_keys_from(message.announcement.removed),
            full=message.announcement.full,
        ),
        draining=message.draining,
    )


def encode_ack(ack: Ack) -> bytes:
    return pb.Ack(
        want_full=ack.want_full, budget_bytes=ack.budget_bytes, drain=ack.drain, role=ack.role
    ).SerializeToString()


def decode_ack(data: bytes) -> Ack:
    message = parse(pb.Ack(), data)
    return Ack(
        want_full=message.want_full,
        budget_bytes=message.budget_bytes if message.HasField("budget_bytes") else None,
        drain=message.drain,
        role=_role(message.role) if message.HasField("role") else None,
    )


def encode_draining(name: str, *, drain: bool, force: bool) -> bytes:
    return pb.Draining(name=name, drain=drain, force=force).SerializeToString()


def decode_draining(data: bytes) -> tuple[str, bool, bool]:
    """A worker's name, whether it shall drain, and whether it shall also if nobody else does its work."""
    message = parse(pb.Draining(), data)
    return message.name, message.drain, message.force


def encode_role(name: str, role: Role) -> bytes:
    return pb.RoleChange(name=name, role=role).SerializeToString()


def decode_role(data: bytes) -> tuple[str, Role]:
    message = parse(pb.RoleChange(), data)
    return message.name, _role(message.role)


def encode_budget(name: str, budget_bytes: int | None) -> bytes:
    return pb.Budget(name=name, budget_bytes=budget_bytes).SerializeToString()


def decode_budget(data: bytes) -> tuple[str, int | None]:
    """A worker's name and the budget that an operator gives it; None gives it back to the router."""
    message = parse(pb.Budget(), data)
    return message.name, message.budget_bytes if message.HasField("budget_bytes") else None


def encode_budgets(told: Mapping[str, SetBudget]) -> bytes:
    return pb.ToldBudgets(
        workers=[
            pb.ToldBudget(name=name, set_by=one.by, set_bytes=one.num_bytes) for name, one in told.items()
        ]
    ).SerializeToString()


def decode_budgets(data: bytes) -> dict[str, SetBudget]:
    """By the names of workers."""
    return {
        one.name: SetBudget(_set_by(one.set_by), one.set_bytes)
        for one in parse(pb.ToldBudgets(), data).workers
    }


def encode_loss(worker: WorkerId, content: bytes) -> bytes:
    return pb.Loss(worker=worker, content=content).SerializeToString()


def decode_loss(data: bytes) -> tuple[WorkerId, bytes]:
    """Who was lost, and the content of the request that is to blame, empty if none is."""
    message = parse(pb.Loss(), data)
    return WorkerId(message.worker), message.content


def encode_lives(workers: Iterable[WorkerId]) -> bytes:
    return pb.Lives(workers=sorted(workers)).SerializeToString()


def decode_lives(data: bytes) -> frozenset[WorkerId]:
    """Lives of workers."""
    return frozenset(WorkerId(worker) for worker in parse(pb.Lives(), data).workers)


def encode_status(status: FleetStatus) -> bytes:
    return pb.FleetStatus(
        workers=[
            pb.WorkerStatus(
                info=_info_to(worker.info),
                load=_load_to(worker.load),
                state=worker.state,
                heard_ago_s=worker.heard_ago_s,
                restorable_depths=worker.restorable_depths,
                set_by=worker.set_by,
                set_bytes=worker.set_bytes,
            )
            for worker in status.workers
        ]
    ).SerializeToString()


def decode_status(data: bytes) -> FleetStatus:
    return FleetStatus(
        workers=tuple(
            WorkerStatus(
                info=_info_from(worker.info),
                load=_load_from(worker.load),
                state=worker.state,
                heard_ago_s=worker.heard_ago_s,
                restorable_depths=worker.restorable_depths,
                set_by=_set_by(worker.set_by),
                set_bytes=worker.set_bytes,
            )
            for worker in parse(pb.FleetStatus(), data).workers
        )
    )


def _set_by(text: str) -> SetBy:
    found = _SET_BY.get(text)
    if found is None:
        raise Malformed(f"a budget is set by one of {', '.join(_SET_BY)}")
    return found


def _role(text: str) -> Role:
    found = _ROLES.get(text)
    if found is None:
        raise Malformed(f"a role is one of {', '.join(_ROLES)}")
    return found


def _info_to(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker=info.worker,
        name=info.name,
        role=info.role,
        address=info.address,
        pid=info.pid,
        node=info.node,
        tensor_parallel_size=info.tensor_parallel_size,
        fingerprint=info.fingerprint,
        layout=info.layout,
        page_tokens=info.page_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        device=info.device,
        memory_bytes=info.memory_bytes,
        memory_floor_bytes=info.memory_floor_bytes,
        memory_max_bytes=info.memory_max_bytes,
        page_bytes=info.page_bytes,
        state_bytes=info.state_bytes,
        step_tokens_max=info.step_tokens_max,
    )


def _info_from(message: pb.WorkerInfo) -> WorkerInfo:
    if not message.worker or not message.page_tokens or not message.step_tokens_max:
        raise Malformed("a worker needs an id, a page size and a step size")
    return WorkerInfo(
        worker=WorkerId(message.worker),
        name=message.name,
        role=_role(message.role),
        address=message.address,
        pid=message.pid,
        node=message.node,
        tensor_parallel_size=message.tensor_parallel_size,
        fingerprint=message.fingerprint,
        layout=message.layout,
        page_tokens=message.page_tokens,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        device=message.device,
        memory_bytes=message.memory_bytes,
        memory_floor_bytes=message.memory_floor_bytes,
        memory_max_bytes=message.memory_max_bytes,
        page_bytes=message.page_bytes,
        state_bytes=message.state_bytes,
        step_tokens_max=message.step_tokens_max,
    )


def _load_to(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        queued_tokens=load.queued_tokens,
        running_rows=load.running_rows,
        waiting_rows=load.waiting_rows,
        memory=pb.MemoryUse(
            pages_live=load.memory.pages_live,
            pages_cached=load.memory.pages_cached,
            states_live=load.memory.states_live,
            states_cached=load.memory.states_cached,
            windows_live=load.memory.windows_live,
            windows_cached=load.memory.windows_cached,
            free=load.memory.free,
            empty=load.memory.empty,
            unmapped=load.memory.unmapped,
        ),
        budget_bytes=load.budget_bytes,
        wanted_bytes=load.wanted_bytes,
        state_slots=load.state_slots,
        counters=load.counters,
        queued_s=load.queued_s,
        speed=pb.Speed(
            step_s=load.speed.step_s,
            token_s=load.speed.token_s,
            pair_s=load.speed.pair_s,
            row_s=load.speed.row_s,
            fetch_bytes_per_s=load.speed.fetch_bytes_per_s,
        ),
    )


def _load_from(message: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        queued_tokens=message.queued_tokens,
        running_rows=message.running_rows,
        waiting_rows=message.waiting_rows,
        memory=MemoryUse(
            pages_live=message.memory.pages_live,
            pages_cached=message.memory.pages_cached,
            states_live=message.memory.states_live,
            states_cached=message.memory.states_cached,
            windows_live=message.memory.windows_live,
            windows_cached=message.memory.windows_cached,
            free=message.memory.free,
            empty=message.memory.empty,
            unmapped=message.memory.unmapped,
        ),
        budget_bytes=message.budget_bytes,
        wanted_bytes=message.wanted_bytes,
        state_slots=message.state_slots,
        counters=dict(message.counters),
        queued_s=message.queued_s,
        speed=Speed(
            step_s=message.speed.step_s,
            token_s=message.speed.token_s,
            pair_s=message.speed.pair_s,
            row_s=message.speed.row_s,
            fetch_bytes_per_s=message.speed.fetch_bytes_per_s,
        ),
    )


def _keys_to(keys: Iterable[bytes]) -> bytes:
    packed = b"".join(keys)
    assert len(packed) % ANNOUNCED_KEY_BYTES == 0, "keys travel cut to ANNOUNCED_KEY_BYTES"
    return packed


def _keys_from(packed: bytes) -> tuple[bytes, ...]:
    if len(packed) % ANNOUNCED_KEY_BYTES:
        raise Malformed(f"{len(packed)} bytes of keys do not divide into {ANNOUNCED_KEY_BYTES}")
    return tuple(
        packed[start : start + ANNOUNCED_KEY_BYTES] for start in range(0, len(packed), ANNOUNCED_KEY_BYTES)
    )
