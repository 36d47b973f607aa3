"""Messages survive the trip to bytes and back; bytes that are not messages are Malformed."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.messages import FleetStatus, PlacementRequest, Route, WorkerStatus
from tidemill.cluster.rpc.proto import tidemill_pb2 as pb
from tidemill.cluster.rpc.router_codec import (
    decode_ack,
    decode_ask,
    decode_budget,
    decode_draining,
    decode_heartbeat,
    decode_lives,
    decode_loss,
    decode_placed,
    decode_role,
    decode_status,
    encode_ack,
    encode_ask,
    encode_budget,
    encode_draining,
    encode_heartbeat,
    encode_lives,
    encode_loss,
    encode_placed,
    encode_role,
    encode_status,
)
from tidemill.cluster.rpc.worker_codec import (
    Cancel,
    ClientFrame,
    Generate,
    Hello,
    Malformed,
    Prefetch,
    Produce,
    StreamItem,
    Trial,
    decode_client_frame,
    decode_worker_frame,
    encode_client_frame,
    encode_worker_frame,
    first_frame,
)
from tidemill.workers.messages import (
    Ack,
    Announcement,
    Delta,
    Grammar,
    GrammarKind,
    HandedOver,
    Heartbeat,
    MemoryUse,
    Overloaded,
    PagesMissing,
    Poisonous,
    Produced,
    Provenance,
    Request,
    RequestError,
    Role,
    Sampling,
    Speed,
    Times,
    TokenLogprob,
    WorkerGone,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

texts = st.text(max_size=20)
names = st.text(st.characters(codec="ascii"), min_size=1, max_size=20)
workers = names.map(WorkerId)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
floats = st.floats(allow_nan=False)
token_ids = st.lists(u32, max_size=20).map(tuple)
keys = st.lists(st.binary(min_size=8, max_size=8), max_size=5).map(tuple)

token_values = st.lists(st.tuples(u32, floats), max_size=3).map(tuple)
grammars = st.builds(Grammar, kind=st.sampled_from(get_args(GrammarKind)), text=texts)
samplings = st.builds(
    Sampling,
    temperature=floats,
    top_k=u32,
    top_p=floats,
    min_p=floats,
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=token_values,
    min_tokens=u32,
    logprobs=st.none() | u32,
    prompt_logprobs=st.none() | u32,
    grammar=st.none() | grammars,
)
requests = st.builds(
    Request,
    request_id=texts,
    tokens=st.lists(u32, min_size=5, max_size=20).map(tuple),
    max_new_tokens=u32,
    sampling=samplings,
    stop_token_ids=token_ids,
    salt=texts,
    gap_tokens_max=st.none() | u32,
    drawn=st.integers(0, 5),
    priority=st.integers(-(2**31), 2**31 - 1),
    tenant=texts,
    ttft_s_max=st.none() | floats,
    queue_offset_s=floats,
    on_trial=st.booleans(),
    scored=u32,
    trace_parent=texts,
)
logprobs = st.lists(st.builds(TokenLogprob, floats, token_values), max_size=3).map(tuple)
client_frames = (
    st.builds(Hello, workers)
    | st.builds(Generate, u64, requests)
    | st.builds(Produce, u64, requests)
    | st.builds(Prefetch, u64, requests)
    | st.builds(Cancel, u64)
)
times = st.builds(Times, waited_s=floats, fetched_s=floats, computed_s=floats, stored_s=floats)
provenances = st.builds(Provenance, reused_tokens=u32, fetched_tokens=u32, computed_tokens=u32, times=times)
bodies = (
    st.builds(
        Delta,
        tokens=token_ids,
        logprobs=logprobs,
        prompt_logprobs=logprobs,
        finish=st.sampled_from([None, "stop", "length"]),
        provenance=st.none() | provenances,
    )
    | st.builds(Produced, depth=u32, provenance=provenances)
    | st.builds(Trial, st.booleans())
)
roles = st.sampled_from(get_args(Role))
infos = st.builds(
    WorkerInfo,
    worker=workers,
    name=names,
    role=roles,
    address=texts,
    pid=u32,
    node=texts,
    tensor_parallel_size=u32,
    fingerprint=texts,
    layout=texts,
    page_tokens=st.integers(1, 2**16),
    page_bytes=u64,
    state_bytes=u64,
    step_tokens_max=st.integers(1, 2**16),
    max_model_len=u64,
    vocab_size=u32,
    eos_token_ids=token_ids,
    device=texts,
    memory_bytes=u64,
    memory_floor_bytes=u64,
    memory_max_bytes=u64,
)
loads = st.builds(
    WorkerLoad,
    queued_tokens=u64,
    queued_s=floats,
    running_rows=u32,
    waiting_rows=u32,
    memory=st.builds(
        MemoryUse,
        pages_live=u64,
        pages_cached=u64,
        states_live=u64,
        states_cached=u64,
        windows_live=u64,
        windows_cached=u64,
        free=u64,
        empty=u64,
        unmapped=u64,
    ),
    budget_bytes=u64,
    wanted_bytes=u64,
    state_slots=u64,
    speed=st.builds(
        Speed, step_s=floats, token_s=floats, pair_s=floats, row_s=floats, fetch_bytes_per_s=floats
    ),
    counters=st.dictionaries(texts, floats, max_size=4),
)
announcements = st.builds(Announcement, added=keys, removed=keys, full=st.booleans())
heartbeats = st.builds(
    Heartbeat, info=infos, sequence=u64, load=loads, announcement=announcements, draining=st.booleans()
)
asks = st.builds(
    PlacementRequest,
    request_id=texts,
    keys=keys,
    num_tokens=u32,
    max_new_tokens=u32,
    avoid=st.frozensets(workers, max_size=3),
    wait_s_max=floats,
    tenant=texts,
    ttft_s_max=st.none() | floats,
    content_hash=st.binary(max_size=16),
    recompute_all=st.booleans(),
    resumed=st.booleans(),
)
routes = st.builds(
    Route,
    decode=workers,
    decode_address=texts,
    prefill=st.none() | workers,
    prefill_address=texts,
    gap_tokens_max=st.none() | u32,
    predicted_s=floats,
    queue_offset_s=floats,
)
statuses = st.builds(
    FleetStatus,
    workers=st.lists(
        st.builds(
            WorkerStatus,
            info=infos,
            load=loads,
            state=texts,
            heard_ago_s=floats,
            restorable_depths=u64,
            set_by=st.sampled_from(["operator", "broker", "share"]),
            set_bytes=u64,
        ),
        max_size=3,
    ).map(tuple),
)

DECODERS: list[Callable[[bytes], Any]] = [
    decode_client_frame,
    decode_worker_frame,
    decode_ask,
    decode_placed,
    decode_draining,
    decode_role,
    decode_heartbeat,
    decode_ack,
    decode_loss,
    decode_lives,
    decode_status,
    decode_budget,
]


@pytest.mark.parametrize(
    "kind",
    [
        Request,
        Sampling,
        Grammar,
        Delta,
        TokenLogprob,
        Produced,
        Provenance,
        Times,
        PlacementRequest,
        Route,
        Heartbeat,
        WorkerInfo,
        MemoryUse,
        WorkerLoad,
        Speed,
        Ack,
        Announcement,
        WorkerStatus,
        FleetStatus,
    ],
)
def test_every_field_travels(kind: type[Any]) -> None:
    assert [field.name for field in fields(kind)] == list(
        getattr(pb, kind.__name__).DESCRIPTOR.fields_by_name
    )


@given(client_frames)
def test_client_frames_survive_the_trip(frame: ClientFrame) -> None:
    assert decode_client_frame(encode_client_frame(frame)) == frame


@given(st.lists(st.builds(StreamItem, u64, bodies), max_size=5))
def test_worker_frames_survive_the_trip(items: list[StreamItem]) -> None:
    assert repr(decode_worker_frame(encode_worker_frame(items))) == repr(items)  # times are not compared


@given(heartbeats, asks, routes, statuses)
def test_fleet_messages_survive_the_trip(
    heartbeat: Heartbeat, ask: PlacementRequest, route: Route, status: FleetStatus
) -> None:
    assert decode_heartbeat(encode_heartbeat(heartbeat)) == heartbeat
    assert decode_ask(encode_ask(ask)) == ask
    assert decode_placed(encode_placed(route)) == route
    assert decode_status(encode_status(status)) == status


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=9), st.integers(1, 20))
def test_a_frame_holds_so_many_items_and_logprobs(sizes: list[tuple[int, bool]], most: int) -> None:
    items = [
        StreamItem(
            call,
            Delta(tokens=(), prompt_logprobs=(TokenLogprob(0.0),) * size) if scored else Trial(alone=True),
        )
        for call, (size, scored) in enumerate(sizes)
    ]
    weights = [1 + size if scored else 1 for size, scored in sizes]
    first = first_frame(items, most)
    assert list(first) == items[: len(first)]
    assert len(first) == 1 or sum(weights[: len(first)]) <= most
    assert len(first) == len(items) or sum(weights[: len(first) + 1]) > most


@given(st.frozensets(workers, max_size=5))
def test_lives_survive_the_trip(lives: frozenset[WorkerId]) -> None:
    assert decode_lives(encode_lives(lives)) == lives


@given(texts, floats, floats)
def test_refusals_survive_the_trip(text: str, predicted_s: float, retry_after_s: float) -> None:
    overloaded = decode_placed(
        encode_placed(Overloaded(text, predicted_s=predicted_s, retry_after_s=retry_after_s))
    )
    assert isinstance(overloaded, Overloaded)
    assert (str(overloaded), overloaded.predicted_s, overloaded.retry_after_s) == (
        text,
        predicted_s,
        retry_after_s,
    )
    poisonous = decode_placed(encode_placed(Poisonous(text)))
    assert isinstance(poisonous, Poisonous)
    assert str(poisonous) == text


@given(
    workers,
    st.builds(
        Ack,
        want_full=st.booleans(),
        budget_bytes=st.none() | u64,
        drain=st.booleans(),
        role=st.none() | roles,
    ),
    st.binary(max_size=16),
    roles,
)
def test_short_messages_survive_the_trip(worker: WorkerId, ack: Ack, content: bytes, role: Role) -> None:
    assert decode_loss(encode_loss(worker, content)) == (worker, content)
    assert decode_draining(encode_draining(worker, drain=ack.drain, force=ack.want_full)) == (
        worker,
        ack.drain,
        ack.want_full,
    )
    assert decode_role(encode_role(worker, role)) == (worker, role)
    assert decode_ack(encode_ack(ack)) == ack
    assert decode_budget(encode_budget(worker, ack.budget_bytes)) == (worker, ack.budget_bytes)


@given(
    st.sampled_from([PagesMissing, WorkerGone, HandedOver]),
    texts,
    st.none() | texts,
    st.integers(0, 599),
    st.none() | texts,
)
def test_failures_survive_the_trip(
    kind: type[PagesMissing] | type[WorkerGone], text: str, param: str | None, status: int, code: str | None
) -> None:
    refusal = RequestError(text, param=param, status=status, code=code)
    first, second = decode_worker_frame(
        encode_worker_frame([StreamItem(1, kind(text)), StreamItem(2, refusal)])
    )
    assert type(first.body) is kind
    assert str(first.body) == text
    assert isinstance(second.body, RequestError)
    assert (str(second.body), second.body.param, second.body.status, second.body.code) == (
        text,
        param,
        status,
        code,
    )
    assert first.last
    assert second.last


@given(st.binary(max_size=200))
def test_foreign_bytes_are_malformed_or_a_message(data: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(data)
        except Malformed:
            continue


@given(heartbeats, st.integers(0, 2**16), st.integers(1, 255))
def test_damaged_bytes_are_malformed_or_a_message(heartbeat: Heartbeat, at: int, flip: int) -> None:
    data = bytearray(encode_heartbeat(heartbeat))
    data[at % len(data)] ^= flip
    try:
        decode_heartbeat(bytes(data))
    except Malformed:
        return


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**40])
def test_a_seed_that_cannot_be_sent_is_the_users_mistake(seed: int) -> None:
    request = Request(request_id="r", tokens=(1,), max_new_tokens=1, sampling=Sampling(seed=seed))
    with pytest.raises(RequestError):
        encode_client_frame(Generate(1, request))


def test_half_a_surrogate_pair_is_the_users_mistake() -> None:
    with pytest.raises(RequestError):
        encode_client_frame(
            Generate(1, Request(request_id="r", tokens=(1,), max_new_tokens=1, salt="\ud800"))
        )


def test_a_failure_with_half_a_surrogate_pair_still_arrives() -> None:
    (item,) = decode_worker_frame(encode_worker_frame([StreamItem(1, WorkerGone("half \ud800"))]))
    assert str(item.body) == "half ?"


@pytest.mark.parametrize("field", [{"logprobs": -1}, {"logit_bias": ((-1, 0.5),)}, {"min_tokens": -1}])
def test_a_sampling_that_cannot_be_sent_is_the_users_mistake(field: dict[str, Any]) -> None:
    request = Request(request_id="r", tokens=(1,), max_new_tokens=1, sampling=Sampling(**field))
    with pytest.raises(RequestError):
        encode_client_frame(Generate(1, request))


@pytest.mark.parametrize(
    "request_of",
    [
        pb.Request(tokens=[1], drawn=2),
        pb.Request(tokens=[1], sampling=pb.Sampling(grammar=pb.Grammar(kind="xml"))),
    ],
)
def test_a_request_that_contradicts_itself_is_malformed(request_of: pb.Request) -> None:
    frame = pb.ClientFrame(generate=pb.Call(call=1, request=request_of))
    with pytest.raises(Malformed):
        decode_client_frame(frame.SerializeToString())


def test_a_token_takes_few_bytes() -> None:
    """A step of 64 rows over a vocabulary of 150,000 fits one network packet."""
    items = [StreamItem(call, Delta(tokens=(150_000,))) for call in range(1000, 1064)]
    assert len(encode_worker_frame(items)) < 1448
