"""Messages survive the trip to bytes and back; bytes that are not messages are Malformed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.ranges import every
from tidemill.cluster.messages import (
    BudgetTarget,
    FleetStatus,
    PlacementRequest,
    RoleScale,
    Route,
    WorkerStatus,
)
from tidemill.cluster.orders import Order, RouterOrder, SupervisorOrder
from tidemill.cluster.rpc.codec import (
    Cancel,
    ClientFrame,
    Generate,
    Hello,
    LossReport,
    Malformed,
    PackedTokens,
    Prefetch,
    Produce,
    StreamItem,
    Trial,
    WireItem,
    decode,
    decode_client_frame,
    decode_heartbeat,
    decode_worker_frame,
    encode,
    encode_client_frame,
    encode_heartbeat,
    encode_worker_frame,
    first_frame,
)
from tidemill.cluster.rpc.placement_codec import (
    decode_placement,
    decode_placement_request,
    encode_placement,
    encode_placement_request,
)
from tidemill.workers.cache_lookup import CacheLookup, LookupEviction
from tidemill.workers.messages import (
    COUNT_MAX,
    Ack,
    Announcement,
    Delta,
    Grammar,
    HandedOver,
    Heartbeat,
    Overloaded,
    PagesMissing,
    Poisonous,
    Pooling,
    Produced,
    Provenance,
    Request,
    RequestError,
    Sampling,
    Speed,
    Times,
    TokenLogprob,
    WorkerGone,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

U32, COUNTS = st.integers(0, 2**32 - 1), st.integers(0, COUNT_MAX)
keys = st.lists(st.binary(min_size=8, max_size=8), max_size=5).map(tuple)
ids = st.text(min_size=1, max_size=20).map(WorkerId)


for builtin, values in ((str, st.text(max_size=20)), (int, U32), (float, st.floats(allow_nan=False))):
    st.register_type_strategy(builtin, values)
st.register_type_strategy(Pooling, every(Pooling))
st.register_type_strategy(WorkerInfo, every(WorkerInfo, worker=ids))
for nested in (
    Grammar,
    Times,
    LookupEviction,
    CacheLookup,
    Provenance,
    TokenLogprob,
    Speed,
    WorkerLoad,
    WorkerStatus,
    BudgetTarget,
):
    st.register_type_strategy(nested, every(nested))

requests = every(
    Request,
    tokens=st.lists(U32, min_size=5, max_size=20).map(tuple),
    drawn=st.integers(0, 5),
    scored=st.integers(0, 5),
    sampling=every(Sampling),
)
client_frames: st.SearchStrategy[ClientFrame] = st.builds(Hello, ids) | st.builds(Cancel, COUNTS)
for kind in (Generate, Produce, Prefetch):
    client_frames |= st.builds(kind, COUNTS, requests)
items = st.builds(StreamItem, COUNTS, every(Delta) | every(Produced) | every(Trial))
announcements = every(Announcement, added=keys, removed=keys)
heartbeats = every(Heartbeat, announcement=announcements)
ORDERS: tuple[type[Order[Any]], ...] = (*get_args(RouterOrder), *get_args(SupervisorOrder))
plain = st.one_of(*map(every, (Ack, FleetStatus, LossReport, RoleScale, *ORDERS)))

DECODERS: list[Callable[[bytes], Any]] = [
    decode_client_frame,
    decode_worker_frame,
    decode_placement_request,
    decode_placement,
    decode_heartbeat,
    *(lambda data, kind=kind: decode(kind, data) for kind in (Ack, FleetStatus, LossReport, *ORDERS)),
]


@given(client_frames)
def test_client_frame_survives_trip(frame: ClientFrame) -> None:
    assert decode_client_frame(encode_client_frame(frame)) == frame


@given(st.lists(items, max_size=5))
def test_worker_frame_survives_trip(items: list[StreamItem]) -> None:
    decoded = decode_worker_frame(encode_worker_frame(items))
    assert repr(decoded) == repr(items), "== ignores the times of a Provenance"


@given(
    heartbeats,
    every(PlacementRequest, keys=keys),
    every(Route),
    plain,
    st.frozensets(ids),
    st.dictionaries(ids, every(BudgetTarget)),
)
def test_fleet_message_survives_trip(
    heartbeat: Heartbeat,
    request: PlacementRequest,
    route: Route,
    message: object,
    workers: frozenset[WorkerId],
    budgets: dict[str, BudgetTarget],
) -> None:
    assert decode_heartbeat(encode_heartbeat(heartbeat)) == heartbeat
    assert decode_placement_request(encode_placement_request(request)) == request
    assert decode_placement(encode_placement(route)) == route
    assert decode(type(message), encode(message)) == message
    assert decode(frozenset[WorkerId], encode(workers)) == workers
    assert decode(dict[str, BudgetTarget], encode(budgets)) == budgets


@given(
    st.sampled_from([PagesMissing, WorkerGone, HandedOver]),
    st.builds(RequestError, param=..., status=..., code=...),
)
def test_failure_survives_trip(kind: type[PagesMissing | WorkerGone], refusal: RequestError) -> None:
    items = [StreamItem(1, kind("half \ud800")), StreamItem(2, refusal)]
    first, second = decode_worker_frame(encode_worker_frame(items))
    assert (type(first.body), str(first.body)) == (kind, "half ?")
    assert (type(second.body), str(second.body)) == (RequestError, str(refusal))
    assert vars(second.body) == vars(refusal)
    assert first.last
    assert second.last


@given(every(Overloaded), st.builds(Poisonous, st.text()))
def test_refusal_survives_trip(overloaded: Overloaded, poisonous: Poisonous) -> None:
    for refusal in (overloaded, poisonous):
        decoded = decode_placement(encode_placement(refusal))
        assert (type(decoded), str(decoded)) == (type(refusal), str(refusal))
        assert not isinstance(decoded, Route)
        assert vars(decoded) == vars(refusal)


@given(heartbeats, client_frames)
def test_decoder_ignores_unknown_fields(heartbeat: Heartbeat, frame: ClientFrame) -> None:
    """A newer process may add a field to a map, or one at the end of an array."""

    more = {"field of a newer version": [1, {2: None}]}
    report = msgspec.msgpack.decode(encode_heartbeat(heartbeat))
    report[0] |= more
    report[0]["info"] |= more
    assert decode_heartbeat(encode([*report, more])) == heartbeat
    call = msgspec.msgpack.decode(encode_client_frame(frame))
    if isinstance(frame, Generate | Produce | Prefetch):
        call[2] |= more
    assert decode_client_frame(encode([*call, more])) == frame


def test_decoder_fills_missing_fields() -> None:
    needed = dict[str, Any](worker="w", name="n", role="mixed", address="a", pid=1, node="h")
    assert decode(WorkerInfo, encode(needed)) == WorkerInfo(**needed)
    assert decode(Delta, encode(("Delta", (1, 2)))) == Delta(tokens=(1, 2))
    with pytest.raises(Malformed, match="worker"):
        decode(WorkerInfo, encode({**needed, "worker": 5}))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=9), st.integers(1, 20))
def test_first_frame_is_bounded(sizes: list[tuple[int, bool]], most: int) -> None:
    items = [
        WireItem(
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


@given(st.binary(max_size=200), heartbeats, client_frames, st.integers(0, 2**16), st.integers(1, 255))
def test_decoders_refuse_foreign_and_damaged_bytes(
    foreign: bytes, heartbeat: Heartbeat, frame: ClientFrame, at: int, flip: int
) -> None:
    def damaged(message: bytes) -> bytes:
        data = bytearray(message)
        data[at % len(data)] ^= flip
        return bytes(data)

    cases = [(decoder, foreign) for decoder in DECODERS]
    cases += [(decode_heartbeat, damaged(encode_heartbeat(heartbeat)))]
    cases += [(decode_client_frame, damaged(encode_client_frame(frame)))]
    for decoder, data in cases:
        with suppress(Malformed):
            decoder(data)


REQUEST = Request(request_id="r", tokens=(1,), max_new_tokens=1)


@pytest.mark.parametrize(
    ("change", "packed"),
    [
        ({"drawn": 2}, (1, 8, b"\1")),
        ({"sampling": {"grammar": {"kind": "xml"}}}, (1, 8, b"\1")),
        ({"tokens": "abc"}, (1, 8, b"\1")),
        ({"max_new_tokens": None}, (1, 8, b"\1")),
        *(
            ({}, packed)
            for packed in [(1, 0, b""), (2**60, 1, b""), (1, 33, b"12345"), (-1, 8, b""), (9, 1, b"1")]
        ),
    ],
)
def test_decoder_refuses_contradictions(change: dict[str, Any], packed: tuple[int, int, bytes]) -> None:
    assert decode_client_frame(encode(("Generate", 1, asdict(REQUEST), PackedTokens(1, 8, b"\1"))))
    with pytest.raises(Malformed):
        decode_client_frame(encode(("Generate", 1, asdict(REQUEST) | change, packed)))
    with pytest.raises(Malformed):
        decode_client_frame(b"\x92\xa6Cancel" + b"\x91" * 200_000)


def test_encoder_refuses_unsendable_request() -> None:
    fields: list[dict[str, Any]] = [
        *({"sampling": Sampling(seed=seed)} for seed in (2**63, -(2**63) - 1, 10**40)),
        {"sampling": Sampling(logprobs=-1)},
        {"sampling": Sampling(logit_bias=((-1, 0.5),))},
        {"sampling": Sampling(min_tokens=-1)},
        {"sampling": Sampling(bad_words=((1, -(2**40)),))},
        {"sampling": Sampling(bad_words=((),))},
        {"sampling": Sampling(temperature=float("nan"))},
        {"sampling": Sampling(repetition_penalty=0.0)},
        {"stop_token_ids": (-1,)},
        {"drawn": -1},
        {"drawn": 2},
        {"scored": 2},
        {"breakpoints": (-5,)},
        {"max_new_tokens": COUNT_MAX + 1},
        {"salt": "\ud800"},
        {"tokens": (-1,)},
        {"tokens": (2**32,)},
    ]
    for field in fields:
        request = replace(REQUEST, **field)
        with pytest.raises(RequestError):
            encode_client_frame(Generate(1, request))
        if "salt" not in field and "tokens" not in field:  # the check of the worker is the same
            whole = {**asdict(request), "tokens": ()}
            with pytest.raises((Malformed, OverflowError)):  # or it has no bytes
                decode_client_frame(encode(("Generate", 1, whole, PackedTokens(1, 8, b"\1"))))


def test_token_takes_few_bytes() -> None:
    """A step of 64 rows over a vocabulary of 150,000 tokens fits one network packet."""
    items = [StreamItem(call, Delta(tokens=(150_000,))) for call in range(1000, 1064)]
    assert len(encode_worker_frame(items)) < 1448
    prompt = Request(request_id="r", tokens=(149_999,) * 2000, max_new_tokens=1)
    assert len(encode_client_frame(Generate(1, prompt))) < 4600
