"""The messages of placement: a request or a frame of several, and the router's answers."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.rpc.codec import Malformed, decode, encode, pack_keys, unpack_keys
from tidemill.workers.messages import Overloaded, Poisonous, Unserved


class _PlacementCall(msgspec.Struct, frozen=True, array_like=True):
    request: PlacementRequest
    keys: bytes


def encode_placement_request(request: PlacementRequest) -> bytes:
    return encode(_call(request))


def decode_placement_request(data: bytes) -> PlacementRequest:
    """Raises Malformed."""
    return _requested(decode(_PlacementCall, data))


def encode_placement_requests(requests: Iterable[PlacementRequest]) -> bytes:
    """Encode a frame of requests, which the router answers together."""
    return encode([_call(request) for request in requests])


def decode_placement_requests(data: bytes) -> list[PlacementRequest]:
    """Raises Malformed."""
    return [_requested(call) for call in decode(list[_PlacementCall], data)]


def _call(request: PlacementRequest) -> _PlacementCall:
    return _PlacementCall(replace(request, keys=()), pack_keys(request.keys))


def _requested(call: _PlacementCall) -> PlacementRequest:
    return replace(call.request, keys=unpack_keys(call.keys))


class _Overload(msgspec.Struct, frozen=True):
    message: str
    predicted_s: float
    retry_after_s: float


class _Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    route: Route | None = None
    overload: _Overload | None = None
    poisonous: str | None = None
    unserved: str | None = None  # in frames of several; a single one is a status of gRPC


def encode_placement(placement: Route | Overloaded | Poisonous) -> bytes:
    return encode(_placement_to(placement))


def encode_placements(placements: Iterable[Route | Overloaded | Poisonous | Unserved]) -> bytes:
    """Encode the router's answers to a frame of requests, in their order."""
    return encode([_placement_to(placement) for placement in placements])


def decode_placements(data: bytes) -> list[Route | Overloaded | Poisonous | Unserved]:
    """Raises Malformed."""
    return list(map(_placement_from, decode(list[_Placement], data)))


def _placement_to(placement: Route | Overloaded | Poisonous | Unserved) -> _Placement:
    match placement:
        case Route():
            return _Placement(route=placement)
        case Overloaded(predicted_s=predicted_s, retry_after_s=retry_after_s):
            return _Placement(overload=_Overload(str(placement), predicted_s, retry_after_s))
        case Poisonous():
            return _Placement(poisonous=str(placement))
        case Unserved():
            return _Placement(unserved=str(placement))


def decode_placement(data: bytes) -> Route | Overloaded | Poisonous | Unserved:
    """Raises Malformed."""
    return _placement_from(decode(_Placement, data))


def _placement_from(placement: _Placement) -> Route | Overloaded | Poisonous | Unserved:
    match placement:
        case _Placement(route=Route() as route):
            return route
        case _Placement(overload=_Overload(message, predicted_s, retry_after_s)):
            return Overloaded(message, predicted_s=predicted_s, retry_after_s=retry_after_s)
        case _Placement(poisonous=str() as message):
            return Poisonous(message)
        case _Placement(unserved=str() as message):
            return Unserved(message)
        case _:
            raise Malformed("a placement has a route or a refusal")
