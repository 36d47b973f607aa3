"""Which workers serve a request: filter, score, pick. Pure.

The score counts tokens: those queued on the worker, those nobody would have to compute if another worker were
taken, and a term for each row that shares its steps. It is the smallest formula that sends a prefix where it
is held and a flood everywhere; ties break by rendezvous hashing on the first page, so that routers agree
without talking.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from tidemill.cluster.fleet import Booked, Booking, Fleet, Member
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.messages import Role, WorkerId

GAP_PAGES_MAX = 2
"""A decode worker computes a gap of this many pages itself: shorter than a hop to a prefill worker is
worth."""

ROW_TOKENS = 16
"""What one more row in a worker's steps costs, in tokens of prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as the router sees it. `keys` are the cut keys of its full pages below the last token."""

    request_id: str
    keys: tuple[bytes, ...]
    num_tokens: int
    max_new_tokens: int
    avoid: frozenset[WorkerId] = field(default_factory=frozenset[WorkerId])  # those that it was lost on
    wait_s_max: float = 60.0
    tenant: str = ""
    ttft_s_max: float | None = None  # None: as long as the server lets it wait
    content: bytes = b""  # names what is asked, whatever its request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The workers of one attempt. `prefill` is None when the decode worker computes what is missing itself;
    `gap_tokens_max` is how much it may compute (None: all of it)."""

    decode: WorkerId
    decode_address: str
    prefill: WorkerId | None = None
    prefill_address: str = ""
    gap_tokens_max: int | None = None
    predicted_s: float = 0.0  # until the first token
    lag_s: float = 0.0  # others who come up to so much later go first: the tenant has had its share


def place(fleet: Fleet, ask: Ask) -> Route | None:
    """The best route now, or None when no worker can decode."""
    decode = _pick(fleet, ask, ("decode", "mixed"), lambda member: _decode_score(member, ask))
    if decode is None:
        return None
    route = Route(decode=decode.info.worker, decode_address=decode.info.address)
    gap_tokens_max = GAP_PAGES_MAX * decode.info.page_tokens
    if decode.info.role == "mixed" or ask.num_tokens - held_tokens(decode, ask) <= gap_tokens_max:
        return route
    prefill = _pick(fleet, ask, ("prefill",), lambda member: member.queued_tokens + _lacking(member, ask))
    if prefill is None:  # serve slowly rather than not at all
        return route
    return Route(
        decode=decode.info.worker,
        decode_address=decode.info.address,
        prefill=prefill.info.worker,
        prefill_address=prefill.info.address,
        gap_tokens_max=gap_tokens_max,
    )


def bookings(fleet: Fleet, ask: Ask, route: Route, now_s: float) -> list[Booked]:
    """What the route adds to the load of its workers until they report it themselves."""
    decode = fleet.members[route.decode]
    if route.prefill is None:
        return [Booked(route.decode, Booking(tokens=_lacking(decode, ask), rows=1, at_s=now_s))]
    prefill = fleet.members[route.prefill]
    return [
        Booked(route.prefill, Booking(tokens=_lacking(prefill, ask), rows=1, at_s=now_s)),
        Booked(route.decode, Booking(tokens=decode.info.page_tokens, rows=1, at_s=now_s)),
    ]


def held_tokens(member: Member, ask: Ask) -> int:
    """The deepest restorable depth of this prompt that the worker has announced."""
    for pages in range(
        restorable_end(ask.num_tokens, member.info.page_tokens) // member.info.page_tokens, 0, -1
    ):
        if pages <= len(ask.keys) and ask.keys[pages - 1] in member.held:
            return pages * member.info.page_tokens
    return 0


def _lacking(member: Member, ask: Ask) -> int:
    return ask.num_tokens - held_tokens(member, ask)


def _decode_score(member: Member, ask: Ask) -> float:
    return member.queued_tokens + ROW_TOKENS * member.rows + _lacking(member, ask)


def _pick(fleet: Fleet, ask: Ask, roles: Iterable[Role], score: Callable[[Member], float]) -> Member | None:
    able = [member for member in fleet.members.values() if member.info.role in roles and not member.draining]
    candidates = [member for member in able if member.info.worker not in ask.avoid] or able
    if not candidates:
        return None
    family = ask.keys[0] if ask.keys else ask.request_id.encode()
    return min(candidates, key=lambda member: (score(member), _rendezvous(family, member.info.name)))


def _rendezvous(family: bytes, name: str) -> bytes:
    return blake2b(family + name.encode(), digest_size=8).digest()
