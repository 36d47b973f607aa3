"""What routers, workers and frontends tell each other about the fleet, as bytes. Pure."""

from collections.abc import Iterable
from typing import get_args

from tidemill.cluster.codec import Malformed, parse
from tidemill.cluster.placement import Ask, Route
from tidemill.cluster.proto import tidemill_pb2 as pb
from tidemill.cluster.service import FleetStatus, SetBy, WorkerStatus
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    Ack,
    Announcement,
    Heartbeat,
    MemoryUse,
    Role,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
_SET_BY: dict[str, SetBy] = {set_by: set_by for set_by in get_args(SetBy)}


def encode_ask(ask: Ask) -> bytes:
    return pb.Ask(
        request_id=ask.request_id,
        keys=_keys_to(ask.keys),
        num_tokens=ask.num_tokens,
        max_new_tokens=ask.max_new_tokens,
        avoid=sorted(ask.avoid),
        wait_s_max=ask.wait_s_max,
    ).SerializeToString()


def decode_ask(data: bytes) -> Ask:
    """Raises Malformed, as the other decoders here do."""
    message = parse(pb.Ask(), data)
    return Ask(
        request_id=message.request_id,
        keys=_keys_from(message.keys),
        num_tokens=message.num_tokens,
        max_new_tokens=message.max_new_tokens,
        avoid=frozenset(WorkerId(worker) for worker in message.avoid),
        wait_s_max=message.wait_s_max,
    )


def encode_route(route: Route) -> bytes:
    return pb.Route(
        decode=route.decode,
        decode_address=route.decode_address,
        prefill=route.prefill,
        prefill_address=route.prefill_address,
        gap_tokens_max=route.gap_tokens_max,
    ).SerializeToString()


def decode_route(data: bytes) -> Route:
    message = parse(pb.Route(), data)
    return Route(
        decode=WorkerId(message.decode),
        decode_address=message.decode_address,
        prefill=WorkerId(message.prefill) if message.HasField("prefill") else None,
        prefill_address=message.prefill_address,
        gap_tokens_max=message.gap_tokens_max if message.HasField("gap_tokens_max") else None,
    )


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
    return pb.Ack(want_full=ack.want_full, budget_bytes=ack.budget_bytes).SerializeToString()


def decode_ack(data: bytes) -> Ack:
    message = parse(pb.Ack(), data)
    return Ack(
        want_full=message.want_full,
        budget_bytes=message.budget_bytes if message.HasField("budget_bytes") else None,
    )


def encode_budget(name: str, budget_bytes: int | None) -> bytes:
    return pb.Budget(name=name, budget_bytes=budget_bytes).SerializeToString()


def decode_budget(data: bytes) -> tuple[str, int | None]:
    """A worker's name and the budget that an operator gives it; None gives it back to the router."""
    message = parse(pb.Budget(), data)
    return message.name, message.budget_bytes if message.HasField("budget_bytes") else None


def encode_loss(worker: WorkerId) -> bytes:
    return pb.Loss(worker=worker).SerializeToString()


def decode_loss(data: bytes) -> WorkerId:
    return WorkerId(parse(pb.Loss(), data).worker)


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


def _info_to(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker=info.worker,
        name=info.name,
        role=info.role,
        address=info.address,
        pid=info.pid,
        node=info.node,
        rank=info.rank,
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
    )


def _info_from(message: pb.WorkerInfo) -> WorkerInfo:
    role = _ROLES.get(message.role)
    if role is None or not message.worker or not message.page_tokens:
        raise Malformed("a worker needs an id, a role and a page size")
    return WorkerInfo(
        worker=WorkerId(message.worker),
        name=message.name,
        role=role,
        address=message.address,
        pid=message.pid,
        node=message.node,
        rank=message.rank,
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
            free=load.memory.free,
            empty=load.memory.empty,
            unmapped=load.memory.unmapped,
        ),
        budget_bytes=load.budget_bytes,
        wanted_bytes=load.wanted_bytes,
        state_slots=load.state_slots,
        counters=load.counters,
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
            free=message.memory.free,
            empty=message.memory.empty,
            unmapped=message.memory.unmapped,
        ),
        budget_bytes=message.budget_bytes,
        wanted_bytes=message.wanted_bytes,
        state_slots=message.state_slots,
        counters=dict(message.counters),
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
