"""The messages between edges, routers and workers, as MessagePack.

A frozen dataclass is sent as a map from its field names. A `Struct` with `array_like` is sent as an array, in
the order of its fields. A decoder checks types, ignores unknown fields, and gives a missing field its
default. So two versions of Tidemill understand each other during a rolling update, as long as every new field
has a default and an array grows at its end.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from numbers import Integral, Real
from struct import unpack
from typing import Annotated, Any, Literal, TypeVar, overload

import msgspec
import numpy as np

from tidemill.cluster.messages import Misses
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    COUNT_MAX,
    Count,
    Delta,
    HandedOver,
    Heartbeat,
    PagesMissing,
    Positive,
    Produced,
    Request,
    RequestError,
    Sampling,
    TokenId,
    WorkerGone,
    WorkerId,
)

MessageT = TypeVar("MessageT")


class Malformed(TidemillError):
    """The bytes from a socket are not the expected message."""


def _number(value: object) -> int | float:
    """Return a NumPy number as the Python number that msgspec can encode."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_number).encode


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:  # noqa: ANN401  a union is no type
    return msgspec.msgpack.Decoder(kind)


@overload
def decode(kind: type[MessageT], data: bytes) -> MessageT: ...
@overload
def decode(kind: Any, data: bytes) -> Any: ...  # noqa: ANN401  a union is no type
def decode(kind: Any, data: bytes) -> Any:
    """Return the message of type `kind` in `data`. Raises Malformed."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{len(data)} bytes are not the expected message: {error}") from error


class _Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array that starts with the name of its class, which distinguishes the members of a union."""


class PackedTokens(msgspec.Struct, frozen=True, array_like=True):
    """`count` token ids of `bits` bits each, the least significant first."""

    count: Count
    bits: Count
    data: bytes


class Hello(_Tagged, frozen=True):
    """The first frame of a stream. `worker` is the incarnation that the edge was routed to."""

    worker: WorkerId


class _Call(_Tagged, frozen=True):
    """`call` is a number that the edge uses once per stream. `packed` has the tokens on the wire."""

    call: Count
    request: Request
    packed: PackedTokens | None = None


class Generate(_Call, frozen=True):
    """Generate an answer. The worker replies with Deltas."""


class Produce(_Call, frozen=True):
    """Compute and store the prompt. The worker replies with Produced."""


class Prefetch(_Call, frozen=True):
    """Fetch the prompt's pages as the store receives them. The worker replies with Produced at the end."""


class Cancel(_Tagged, frozen=True):
    """End a call. With a `name` there is none: a tenant no longer retains what it named so."""

    call: Count
    tenant: str = ""
    name: str = ""


ClientFrame = Hello | Generate | Produce | Prefetch | Cancel

Failure = PagesMissing | WorkerGone | RequestError
"""An exception with which a call on a worker fails at the edge."""


class Trial(_Tagged, frozen=True):
    """`alone` is True when the worker starts to run this request and no other. It is False when the trial is
    over, or has to begin again."""

    alone: bool


class _Failed(_Tagged, frozen=True):
    kind: Literal["PagesMissing", "HandedOver", "WorkerGone", "RequestError"]
    message: str
    param: str | None = None
    status: Count = 400
    code: str | None = None


class WireItem(msgspec.Struct, frozen=True, array_like=True):
    """A StreamItem on the wire. An int is a plain token: a Delta of this token and nothing else."""

    call: Count
    body: TokenId | Delta | Produced | Trial | _Failed


class StreamItem(msgspec.Struct, frozen=True):
    """An item that a worker sends for one call. Produced, a failure, and a finished Delta end their call."""

    call: Count
    body: Delta | Produced | Trial | Failure

    @property
    def last(self) -> bool:
        match self.body:
            case Trial():
                return False
            case Delta(finish=finish):
                return finish is not None
            case _:
                return True


def encode_client_frame(frame: ClientFrame) -> bytes:
    """Raises RequestError for a number or a text that cannot be sent, such as a seed beyond 64 bits or half a
    surrogate pair."""
    try:
        if not isinstance(frame, Generate | Produce | Prefetch):
            return encode(frame)
        request = frame.request
        bare = _bare(request) | {"tokens": (), "sampling": _bare(request.sampling)}
        data = encode((type(frame).__name__, frame.call, bare, _pack_tokens(request.tokens)))
        _check(request, len(request.tokens))
        decode(ClientFrame, data)  # as the worker will
    except (ValueError, OverflowError, Malformed) as error:
        raise RequestError(f"the request cannot be sent to a worker: {error}") from error
    return data


def _bare(message: Request | Sampling) -> dict[str, Any]:
    """Return the fields whose values are not their defaults. A decoder fills in the others."""
    values = ((field, getattr(message, field.name)) for field in fields(message))
    return {field.name: value for field, value in values if value != field.default}


def decode_client_frame(data: bytes) -> ClientFrame:
    """Raises Malformed."""
    frame: ClientFrame = decode(ClientFrame, data)
    if not isinstance(frame, Generate | Produce | Prefetch):
        return frame
    tokens = () if frame.packed is None else _unpack_tokens(frame.packed)
    _check(frame.request, len(tokens))
    return type(frame)(frame.call, replace(frame.request, tokens=tokens))


def _check(request: Request, num_tokens: int) -> None:
    """Raise Malformed for a request of `num_tokens` tokens whose numbers do not fit each other."""
    if request.drawn > num_tokens:
        raise Malformed(f"{request.drawn} of {num_tokens} tokens cannot have been drawn")
    if request.scored > num_tokens:
        raise Malformed(f"{request.scored} of {num_tokens} tokens cannot have a logprob")


def _pack_tokens(tokens: Sequence[int]) -> PackedTokens:
    bits = max(tokens, default=0).bit_length() or 1
    words = np.frombuffer(array("I", tokens), np.uint8).reshape(-1, 4)
    ones = np.unpackbits(words, axis=1, count=bits, bitorder="little")
    return PackedTokens(len(tokens), bits, np.packbits(ones, bitorder="little").tobytes())


def _unpack_tokens(packed: PackedTokens) -> tuple[int, ...]:
    """Raises Malformed."""
    count, bits = packed.count, packed.bits
    if not 1 <= bits <= 32 or count < 0 or len(packed.data) != (count * bits + 7) // 8:
        raise Malformed(f"{len(packed.data)} bytes are not {count} tokens of {bits} bits")
    ones = np.unpackbits(np.frombuffer(packed.data, np.uint8), count=count * bits, bitorder="little")
    weights = 1 << np.arange(bits, dtype=np.uint32)
    return tuple((ones.reshape(count, bits) @ weights).tolist())


def first_frame(items: Sequence[WireItem], most: int) -> Sequence[WireItem]:
    """Return the first of `items` that fit one frame: at least one, and at most `most` items and prompt
    logprobs together."""
    left = most
    for count, item in enumerate(items):
        left -= 1 + (len(item.body.prompt_logprobs) if isinstance(item.body, Delta) else 0)
        if left < 0:
            return items[: max(1, count)]
    return items


def encode_worker_frame(items: Iterable[StreamItem]) -> bytes:
    return encode([wire_of(item) for item in items])


def wire_items(data: bytes) -> list[WireItem]:
    """Return the items of a worker's frame, plain tokens as numbers. Raises Malformed."""
    return decode(list[WireItem], data)


def wire_of(item: StreamItem) -> WireItem:
    return WireItem(item.call, _body_to(item.body))


def item_of(wire: WireItem) -> StreamItem:
    return StreamItem(wire.call, _body_from(wire.body))


def decode_worker_frame(data: bytes) -> list[StreamItem]:
    """Raises Malformed."""
    return [item_of(wire) for wire in wire_items(data)]


def _body_to(body: Delta | Produced | Trial | Failure) -> int | Delta | Produced | Trial | _Failed:
    match body:
        case Delta(
            tokens=(token,), logprobs=(), prompt_logprobs=(), finish=None, provenance=None, pooled=b""
        ):
            return token
        case Delta() | Produced() | Trial():
            return body
        case RequestError():
            return _Failed("RequestError", _printable(body), body.param, body.status, body.code)
        case PagesMissing():
            return _Failed("PagesMissing", _printable(body))
        case HandedOver():
            return _Failed("HandedOver", _printable(body))
        case WorkerGone():
            return _Failed("WorkerGone", _printable(body))


def _body_from(body: int | Delta | Produced | Trial | _Failed) -> Delta | Produced | Trial | Failure:
    match body:
        case int():
            return Delta(tokens=(body,))
        case _Failed("RequestError", message, param, status, code):
            return RequestError(message, param=param, status=status, code=code)
        case _Failed(kind, message):
            return {"PagesMissing": PagesMissing, "HandedOver": HandedOver}.get(kind, WorkerGone)(message)
        case _:
            return body


def _printable(error: Exception) -> str:
    return str(error).encode(errors="replace").decode()


class LossReport(msgspec.Struct, frozen=True):
    """The edge lost `worker`. `content` names the request to blame, empty if the edge blames none."""

    worker: WorkerId
    content: bytes = b""


class RateCount(msgspec.Struct, frozen=True):
    """A request of the key with this digest; see Rates.count."""

    name: str
    per_minute: Positive
    ahead_s: Annotated[float, msgspec.Meta(ge=0, le=COUNT_MAX)]


class EdgeReport(msgspec.Struct, frozen=True):
    """The answers and refusals of an edge since its last report, the number of resets that it knows, and its
    open requests."""

    edge: str
    misses: Misses
    resets: Count
    open_requests: Count = 0


class _Report(msgspec.Struct, frozen=True, array_like=True):
    heartbeat: Heartbeat
    added: bytes
    removed: bytes


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    announcement = heartbeat.announcement
    bare = replace(heartbeat, announcement=replace(announcement, added=(), removed=()))
    return encode(_Report(bare, pack_keys(announcement.added), pack_keys(announcement.removed)))


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Raises Malformed."""
    report = decode(_Report, data)
    info, announcement = report.heartbeat.info, report.heartbeat.announcement
    if not info.worker:
        raise Malformed("a worker needs an id")
    added, removed = unpack_keys(report.added), unpack_keys(report.removed)
    return replace(report.heartbeat, announcement=replace(announcement, added=added, removed=removed))


def pack_keys(keys: Iterable[bytes]) -> bytes:
    packed = b"".join(keys)
    assert len(packed) % ANNOUNCED_KEY_BYTES == 0, "keys travel cut to ANNOUNCED_KEY_BYTES"
    return packed


def unpack_keys(packed: bytes) -> tuple[bytes, ...]:
    if len(packed) % ANNOUNCED_KEY_BYTES:
        raise Malformed(f"{len(packed)} bytes of keys do not divide into {ANNOUNCED_KEY_BYTES}")
    return unpack(f"{ANNOUNCED_KEY_BYTES}s" * (len(packed) // ANNOUNCED_KEY_BYTES), packed)
