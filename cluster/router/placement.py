"""Placement: choose the workers of a request by filter, score and pick. Pure.

    score = W + S(u) + kappa (S(k) - S(most k)) + extra     kappa = 2 max(1, rho (2 - rho) / (1 - rho)^2)

`W` is the wait for queued work. `S(x)` is the time to serve the prompt when its first `x` tokens
are on the worker: `u` tokens can be restored there, and the pages of `k` tokens are or will be
there. The term with kappa is the cost for later requests. A prefix computed away from its home is
computed twice and evicts other pages, and in a busy fleet others wait for that work. The term is
bounded by the patience of one request (decision 17). `extra` is what else speaks against a worker
(an `Affinity`). A decode worker is chosen by the cost of prompt and answer, a mixed one also by
what gives way to the prompt in its memory. Ties break by rendezvous hashing on the first page that
no worker has, so that routers agree without communication.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.cost_model import Costs, Vector
from tidemill.cluster.router.fleet_view import Booking, Column, Fleet, Member, RequestBooked
from tidemill.cluster.router.prefix_table import cut_keys
from tidemill.workers.messages import WorkerId, WorkerInfo
from tidemill.workers.scheduling.limits import ANSWER_TOKENS

GAP_PAGES_MAX = 2
GAP_TOKENS_MIN = 128
"""The longest gap that a decode worker always computes itself, for less than a hop costs. With large pages
the gap is limited to this many tokens, but at least one page."""

GAP_S_MAX = 0.25
"""The longest time for a longer gap, during which the streams of the decode worker wait. It computes such a
gap only if no prefill worker would finish earlier and the prompt has no home."""

HOME_SHARE = 0.25
"""The share of a prompt that makes a prefill worker its home, where later requests look for it."""

HOP_S = 0.02
HOP_PAGES = 2
"""The cost of a hop to a prefill worker: in pages of prompt tokens while speeds are unknown."""

KAPPA = 2.0
"""The least cost to other requests of a second of duplicate work, which evicts pages of theirs. In a busy
fleet the cost is higher, because other requests wait for that work."""

PATIENCE_S = 1.3
"""The longest extra wait for the benefit of others, beyond the least wait of all workers."""

FULL_S = 0.03
"""The cost of a worker whose memory is half full. At nine tenths it is nine times as much."""

OVERFULL_S = 60.0
"""The cost of a worker whose memory does not suffice, times the demand divided by its budget."""

FILLED_MAX = 0.98

TOKENS_PER_S = 1e4
"""The assumed speed while speeds are unknown."""

RHO_MAX = 0.99

TIED = 1.01
"""Scores within this factor are equal."""

SPREAD = np.uint64(0xD6E8FEB86659FD93)  # an odd number with half of its bits set

Affinity = Callable[[Fleet, PlacementRequest], Vector]
"""A further cost of each worker for a request, for example that it has to load something first: in
seconds, by slot. It counts in the choice of prefill and decode workers, and in no prediction."""

Mask = npt.NDArray[np.bool_]
Chosen = npt.NDArray[np.int64]
"""Slots of workers."""


def place(fleet: Fleet, request: PlacementRequest, now_s: float, extra: Vector | None = None) -> Route | None:
    """Return the best route now, or None when no worker can decode. `extra` is added to the scores: seconds
    for each slot."""
    view = _View(fleet, request, now_s)
    decoding, prefilling = _eligible(view, Column.DECODES), _eligible(view, Column.PREFILLS)
    against = 0.0 if extra is None else extra * (1.0 if view.costs.in_seconds else TOKENS_PER_S)
    if request.pools:
        slots = prefilling if len(prefilling) else decoding
        return _pooling_route(view, slots, against) if len(slots) else None
    if not len(decoding):
        return None
    hops = len(prefilling) > 0 and not request.recompute_all
    prefill = _best_prefill(view, prefilling, against) if hops else None
    mixed = view.table[Column.MIXED] > 0
    start = np.where(mixed, view.restorable, view.announced)  # `u` of a stream
    decode_time = prefill_time(view, start, request.num_tokens)
    alone = mixed | _computes_alone(view, start, decode_time, prefill)
    first_token = first_token_time(view, decode_time, alone, prefill)
    score = first_token + locality_penalty(view, decoding, alone, prefill) + crowding_penalty(view) + against
    best = _pick(view, decoding, score)
    hop = None if prefill is None or alone[best] else prefill.member.info
    return _route(view, best, hop, first_token)


def route_of(
    decode: WorkerInfo,
    hop: WorkerInfo | None,
    predicted_s: float,
    *,
    shared_pages: int,
    elsewhere: WorkerId | None,
    elsewhere_pages: int,
) -> Route:
    """Return the route to a decode worker, over a prefill worker if there is a `hop`."""
    return Route(
        decode=decode.worker,
        decode_address=decode.address,
        prefill=hop.worker if hop else None,
        prefill_address=hop.address if hop else "",
        gap_tokens_max=GAP_PAGES_MAX * decode.page_tokens if hop else None,
        predicted_s=predicted_s,
        shared_pages=shared_pages,
        elsewhere=elsewhere,
        elsewhere_pages=elsewhere_pages,
    )


def bookings(fleet: Fleet, request: PlacementRequest, route: Route, now_s: float) -> list[RequestBooked]:
    """Return the load that the route adds to its workers until their heartbeats include it."""
    decode = fleet.members[route.decode]
    if route.prefill is None:
        view = _View(fleet, request, now_s, [decode.slot])
        return [RequestBooked(route.decode, _prompt_booking(view, 0, request.num_tokens))]
    prefill = fleet.members[route.prefill]
    view = _View(fleet, request, now_s, [decode.slot, prefill.slot])
    prompt = _prompt_booking(view, 1, view.boundary)
    wait_s = float(view.costs.wait[1]) if view.costs.in_seconds else 0.0
    stream = Booking(
        tokens=decode.info.page_tokens,
        rows=1,
        at_s=now_s,
        due_s=now_s + wait_s + prompt.seconds,
        num_bytes=int(_needed_bytes(view)[0]),
        keys=request.keys,
    )
    return [RequestBooked(route.prefill, prompt), RequestBooked(route.decode, stream)]


class _Prefill(NamedTuple):
    """The best prefill worker, and the pages that each decode worker would fetch from it."""

    member: Member
    done: float  # the time until it has computed the prompt
    resident: float  # in tokens
    overlapped: Vector  # pages that arrive while it computes
    late: Vector  # pages of its last step


class _View:
    """The fleet, or some slots of it, and what each worker has of one prompt, in tokens:

    0         restorable    resident        boundary  num_tokens
    |------------ full pages with keys ---------|---- tail ----|
    """

    def __init__(
        self, fleet: Fleet, request: PlacementRequest, now_s: float, slots: list[int] | None = None
    ) -> None:
        self.fleet = fleet
        self.request = request
        self.now_s = now_s
        self.table = table = fleet.table if slots is None else fleet.table[:, slots]
        self.costs = Costs(table, now_s, like=fleet.table)
        announced, resident = fleet.depths(request.keys)
        page_tokens = fleet.table[Column.PAGE_TOKENS]
        self.boundary = len(request.keys) * int(page_tokens.max())
        self.stored = float((announced * page_tokens * fleet.table[Column.PUBLISHES]).max())
        if slots is not None:
            announced, resident = announced[slots], resident[slots]
        self.announced: Vector = announced * self.costs.page_tokens
        self.resident: Vector = resident * self.costs.page_tokens  # is or will be there: `k`
        hybrid = table[Column.STATE_BYTES] > 0
        self.restorable: Vector = np.where(hybrid, self.announced, self.resident)  # `u`


def _pooling_route(view: _View, slots: Chosen, against: Vector | float) -> Route:
    """Return the route to the worker that computes a whole prompt first, for which nothing is drawn."""
    end = view.request.num_tokens
    done = view.costs.wait + prefill_time(view, view.restorable, end)
    best = _pick(view, slots, done + _duplicate_work(view, slots, end) + crowding_penalty(view) + against)
    return _route(view, best, None, done + view.costs.step)


def _route(view: _View, decode_slot: int, hop: WorkerInfo | None, predicted: Vector) -> Route:
    """Return the route over these workers. `predicted` are times to first token by decode worker."""
    fleet = view.fleet
    computing = decode_slot if hop is None else fleet.members[hop.worker].slot
    slot, pages = _deepest_elsewhere(view, computing)
    return route_of(
        fleet.at(decode_slot).info,
        hop,
        float(predicted[decode_slot]) if view.costs.in_seconds else 0.0,
        shared_pages=fleet.shared_pages(view.request.keys),
        elsewhere=fleet.at(slot).info.worker if pages else None,
        elsewhere_pages=pages,
    )


def prefill_time(view: _View, start: Vector, end: int) -> Vector:
    """Return the time of each worker to compute or fetch `[start, end)` of the prompt."""
    serving = view.costs.serving(start, view.stored, end)
    return view.costs.beside(serving, min(view.request.max_new_tokens, ANSWER_TOKENS))


def first_token_time(view: _View, decode_time: Vector, alone: Mask, prefill: _Prefill | None) -> Vector:
    """Return the time to first token by decode worker, through `prefill` where it is not `alone`.
    `decode_time` is the time to compute the prompt on the decode worker."""
    costs = view.costs
    if prefill is None:
        return costs.wait + decode_time + costs.step
    hop = HOP_S if costs.in_seconds else HOP_PAGES * costs.page_tokens
    fetch = prefill.late * costs.page + np.sign(prefill.late) * costs.state
    tail = costs.computing(view.boundary, view.request.num_tokens) * costs.slowdown
    through_prefill = prefill.done + hop + fetch + tail
    return costs.wait + np.where(alone, decode_time, through_prefill) + costs.step


def locality_penalty(view: _View, slots: Chosen, alone: Mask, prefill: _Prefill | None) -> Vector:
    """Return the cost of pages that a worker does not have, in addition to the time to first token.

    Where one of `slots` computes the prompt `alone` it is duplicate work, on a mixed worker also pages that
    give way. Otherwise the worker fetches them while the prefill worker computes.
    """
    end = view.request.num_tokens
    evicted = np.where(view.table[Column.MIXED] > 0, _evicted_work(view, end), 0.0)
    computed = (_duplicate_work(view, slots, end) + evicted) * view.costs.slowdown
    return computed if prefill is None else np.where(alone, computed, prefill.overlapped * view.costs.page)


def crowding_penalty(view: _View) -> Vector:
    """Return the cost of other rows, which slow each other down, and of full memory."""
    costs, rows = view.costs, view.table[Column.ROWS]
    taken = _filled(view, view.table[Column.TAKEN_BYTES])
    overfull = np.where(taken > 1, OVERFULL_S * taken, 0.0)
    if not costs.in_seconds:
        return rows * costs.row + overfull * TOKENS_PER_S
    slowed = 2 * min(view.request.max_new_tokens, ANSWER_TOKENS) * rows * costs.row
    filled = np.minimum(taken, FILLED_MAX)
    return slowed + FULL_S * filled / (1 - filled) + overfull


def _eligible(view: _View, column: Column) -> Chosen:
    """Return the workers for this work. Those where the request failed are better than none."""
    members = view.fleet.members
    eligible = np.flatnonzero(view.table[column])
    failed = [members[worker].slot for worker in view.request.avoid if worker in members]
    others = eligible[~np.isin(eligible, failed)] if failed else eligible
    return others if len(others) else eligible


def _deepest_elsewhere(view: _View, computing: int) -> tuple[int, int]:
    """Return the slot that can restore most pages, other than the computing worker's, and the pages. It
    names its pages as that worker does."""
    namespace = view.table[Column.NAMESPACE]
    pages = np.where(namespace == namespace[computing], view.announced / view.costs.page_tokens, 0.0)
    pages[computing] = 0.0
    slot = int(np.lexsort((view.table[Column.NAME], pages))[-1])
    return slot, int(pages[slot])


def _pick(view: _View, slots: Chosen, scores: Vector) -> int:
    """Return the slot with the least score. Among equals, rendezvous hashing on the first page of the prompt
    that none of them has decides (Thaler and Ravishankar, 1998)."""
    score = scores[slots]
    tied = slots[score <= score.min() * TIED]
    if len(tied) == 1:
        return int(tied[0])
    request = view.request
    depth = int((view.resident[tied] / view.costs.page_tokens[tied]).max())
    known = depth >= len(request.keys)
    family = blake2b(request.request_id.encode(), digest_size=8).digest() if known else request.keys[depth]
    names = view.table[Column.NAME, tied].astype(np.uint64)
    mixed = (names ^ cut_keys([family])) * SPREAD
    mixed = (mixed ^ (mixed >> np.uint64(32))) * SPREAD
    return int(tied[np.argmax(mixed ^ (mixed >> np.uint64(29)))])


def _best_prefill(view: _View, slots: Chosen, against: Vector | float) -> _Prefill:
    done = view.costs.wait + prefill_time(view, view.restorable, view.boundary)
    best = _pick(view, slots, done + _duplicate_work(view, slots, view.boundary) + against)
    costs = view.costs
    pages = np.maximum(0.0, view.boundary - view.restorable) / costs.page_tokens
    late = np.minimum(pages, np.ceil(costs.step_tokens / costs.page_tokens))
    return _Prefill(
        member=view.fleet.at(best),
        done=float(done[best]),
        resident=float(view.resident[best]),
        overlapped=pages - late,
        late=late,
    )


def _computes_alone(view: _View, start: Vector, decode_time: Vector, prefill: _Prefill | None) -> Mask:
    """Return the decode workers that compute the prompt `[start, end)` themselves."""
    costs, end = view.costs, view.request.num_tokens
    if prefill is None:
        return np.ones(len(start), np.bool_)
    short = np.minimum(GAP_PAGES_MAX * costs.page_tokens, np.maximum(costs.page_tokens, GAP_TOKENS_MIN))
    alone = end - start <= short
    if costs.in_seconds:
        homeless = (prefill.resident < HOME_SHARE * end) | (start >= prefill.resident)
        quick = costs.computing(start, end) * costs.slowdown <= GAP_S_MAX
        alone |= homeless & quick & (decode_time <= prefill.done)
    namespace = view.table[Column.NAMESPACE]
    return alone | (namespace != namespace[prefill.member.slot])  # it cannot use those pages


def _duplicate_work(view: _View, slots: Chosen, end: int) -> Vector:
    """Return the cost to later requests of computing on each worker what another one of `slots` has of
    `[0, end)`, limited by the patience of this request: 0 where none has more, even on a slow worker."""
    rho = min(view.fleet.rho(view.now_s), RHO_MAX)
    gap = 1 - rho
    kappa = KAPPA * max(1.0, rho * (2 - rho) / (gap * gap))
    costs, most = view.costs, np.maximum(view.resident, view.resident[slots].max())
    cost = costs.serving(view.resident, view.stored, end) - costs.serving(most, view.stored, end)
    second = 1.0 if costs.in_seconds else TOKENS_PER_S
    return np.minimum(kappa * cost, PATIENCE_S * second + costs.wait[slots].min())


def _evicted_work(view: _View, end: int) -> Vector:
    """Return the cost to later requests of the pages that give way to `[0, end)`. They are of as many tokens,
    and the fuller a worker is, the sooner a request needs them."""
    used = view.table[Column.TAKEN_BYTES] + view.table[Column.CACHED_BYTES]
    share = np.minimum(_filled(view, used), 1.0)
    return np.maximum(end - view.resident, 0.0) * view.costs.token * (share * share * share)


def _filled(view: _View, used: Vector) -> Vector:
    """Return the share of each worker's memory that the request and `used` bytes fill; 0 without a budget."""
    budget = view.table[Column.BUDGET_BYTES]
    return np.where(budget > 0, (used + _needed_bytes(view)) / np.maximum(budget, 1.0), 0.0)


def _prompt_booking(view: _View, index: int, end: int) -> Booking:
    """Return the work of computing the prompt `[0, end)` on the worker at `index` of the view."""
    seconds = prefill_time(view, view.restorable, end)
    return Booking(
        tokens=view.request.num_tokens - int(view.restorable[index]),
        rows=1,
        at_s=view.now_s,
        due_s=view.now_s,
        seconds=float(seconds[index]) if view.costs.in_seconds else 0.0,
        num_bytes=int(_needed_bytes(view)[index]),
        keys=view.request.keys,
    )


def _needed_bytes(view: _View) -> Vector:
    """Return the memory for prompt and answer beyond what can be restored, which is in the worker's memory
    already."""
    table, request = view.table, view.request
    answer = np.sign(table[Column.DECODES]) * min(request.max_new_tokens, ANSWER_TOKENS)
    pages = np.ceil((request.num_tokens + answer - view.restorable) / table[Column.PAGE_TOKENS])
    return pages * table[Column.PAGE_BYTES] + table[Column.STATE_BYTES]
