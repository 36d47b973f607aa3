"""Chooses the workers of a request: filter, score, pick. Pure.

    score = W + S(u) + kappa (S(k) - least S(k))     kappa = 2 max(1, rho (2 - rho) / (1 - rho)^2)

`W` is the wait for queued work.
`S(x)` is the time to serve the prompt where its first `x` tokens are: depth `u` can be restored there, and
pages up to `k` are or will be there.
The last term is the cost to later requests: a prefix taken away from its home is computed again and pushes
other pages out.
The busier the fleet is, the longer other requests wait for that.
The request's patience bounds it (docs/decisions/0017).
A stream goes where prompt and answer cost least.
Rendezvous hashing on the first page that no worker has breaks ties, so that routers agree without talking.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.cost_model import Costs, Vector
from tidemill.cluster.router.fleet_view import Booking, Column, Fleet, Member, RequestBooked
from tidemill.cluster.router.prefix_table import cut_keys
from tidemill.workers.scheduling.prefill_throttle import BESIDE_STREAMS

GAP_PAGES_MAX = 2
GAP_TOKENS_MIN = 128
"""A decode worker always computes a gap of GAP_PAGES_MAX pages itself, and of large pages no more than
GAP_TOKENS_MIN tokens and the tail, because a hop to a prefill worker would cost more.
"""

GAP_S_MAX = 0.25
"""The longest gap, in seconds, that a decode worker computes itself while all prefill workers are so busy
that none would finish sooner. Its streams wait meanwhile.
"""

HOME_SHARE = 0.25
"""A decode worker does not compute such a gap if a prefill worker holds this share of the prompt: later
requests of the family would miss the rest.
"""

HOP_S = 0.02
HOP_PAGES = 2
"""The cost of computing a prompt elsewhere; in pages of prompt tokens while speeds are unknown."""

KAPPA = 2.0
"""The cost to other requests of a second of duplicated work: it pushes out pages that are computed again.
In a busy fleet it is higher by the wait of later requests.
"""

PATIENCE_S = 1.3
"""The extra time that a request waits for the sake of others, beyond what all must wait."""

ANSWER_TOKENS = 256
"""The longest answer that placement assumes, because the limits of clients say little."""

FULL_S = 0.1
"""The cost of a worker whose memory is half full; nine times as much at nine tenths."""

OVERFULL_S = 60.0
"""The cost of a worker whose memory does not suffice, per multiple of its memory."""

FILLED_MAX = 0.98

TOKENS_PER_S = 1e4
"""The tokens that count as a second while speeds are unknown."""

RHO_MAX = 0.99

TIED = 1.01
"""Scores within this factor are equal."""

SPREAD = np.uint64(0xD6E8FEB86659FD93)  # an odd number with half of its bits set

Chosen = npt.NDArray[np.int64]
"""Slots of workers."""


def place(fleet: Fleet, ask: PlacementRequest, now_s: float) -> Route | None:
    """Return the best route now, or None when no worker can decode."""
    view = _View(fleet, ask, now_s)
    decoding = view.able(Column.DECODES)
    if not len(decoding):
        return None
    computing = view.able(Column.PREFILLS)
    prefill = view.best_prefill(computing) if len(computing) and not ask.recompute_all else None
    streams = view.streams(prefill)
    best = view.pick(decoding, streams.score)
    decode = fleet.at(best).info
    predicted_s = float(streams.first[best]) if view.costs.in_seconds else 0.0
    if prefill is None or streams.alone[best]:
        return Route(decode=decode.worker, decode_address=decode.address, predicted_s=predicted_s)
    return Route(
        decode=decode.worker,
        decode_address=decode.address,
        prefill=prefill.member.info.worker,
        prefill_address=prefill.member.info.address,
        gap_tokens_max=GAP_PAGES_MAX * decode.page_tokens,
        predicted_s=predicted_s,
    )


def bookings(fleet: Fleet, ask: PlacementRequest, route: Route, now_s: float) -> list[RequestBooked]:
    """Return the load that the route adds to its workers until they report it themselves."""
    decode = fleet.members[route.decode]
    if route.prefill is None:
        view = _View(fleet, ask, now_s, [decode.slot])
        return [RequestBooked(route.decode, view.prompt(0, ask.num_tokens))]
    prefill = fleet.members[route.prefill]
    view = _View(fleet, ask, now_s, [decode.slot, prefill.slot])
    produced = view.prompt(1, view.boundary)
    wait_s = float(view.costs.wait[1]) if view.costs.in_seconds else 0.0
    streamed = Booking(
        tokens=decode.info.page_tokens,
        rows=1,
        at_s=now_s,
        due_s=now_s + wait_s + produced.seconds,
        num_bytes=int(view.needed_bytes()[0]),
        keys=ask.keys,
    )
    return [RequestBooked(route.prefill, produced), RequestBooked(route.decode, streamed)]


class _Prefill(NamedTuple):
    """The prefill worker that would compute the prompt, the time at which it would be done, and the number
    of tokens that are or will be there anyway.
    """

    member: Member
    done: float
    resident: float


class _Streams(NamedTuple):
    """For each worker that takes streams: the score, the time to first token, and whether it computes the
    prompt alone.
    """

    score: Vector
    first: Vector
    alone: npt.NDArray[np.bool_]


class _View:
    """The fleet, or some of its slots, from the view of one request. Depths are in tokens."""

    def __init__(
        self, fleet: Fleet, ask: PlacementRequest, now_s: float, slots: list[int] | None = None
    ) -> None:
        self._fleet = fleet
        self._ask = ask
        self._now_s = now_s
        self._table = table = fleet.table if slots is None else fleet.table[:, slots]
        self.costs = Costs(table, now_s, like=fleet.table)
        announced, resident = fleet.depths(ask.keys)
        page_tokens = fleet.table[Column.PAGE_TOKENS]
        self.boundary = len(ask.keys) * int(page_tokens.max())
        self._stored = float((announced * page_tokens).max())  # workers publish what they compute
        if slots is not None:
            announced, resident = announced[slots], resident[slots]
        self._announced: Vector = announced * self.costs.page_tokens
        self._resident: Vector = resident * self.costs.page_tokens
        hybrid = table[Column.STATE_BYTES] > 0
        self._restorable: Vector = np.where(hybrid, self._announced, self._resident)
        rho = min(fleet.rho(now_s), RHO_MAX)
        self._kappa = KAPPA * max(1.0, rho * (2 - rho) / (1 - rho) ** 2)
        streams = (table[Column.DECODES] > 0) & (table[Column.ROWS] > 0)
        self._beside: Vector = np.where(streams, BESIDE_STREAMS, 1.0)

    def able(self, column: Column) -> Chosen:
        """Return the workers that do this. Those that the request was lost on are better than none."""
        able = np.flatnonzero(self._table[column])
        lost = [
            self._fleet.members[worker].slot for worker in self._ask.avoid if worker in self._fleet.members
        ]
        others = able[~np.isin(able, lost)] if lost else able
        return others if len(others) else able

    def pick(self, slots: Chosen, scores: Vector) -> int:
        """Return the slot with the least score.
        Ties go to the worker whose name is nearest to the first page that none of them has (rendezvous
        hashing, Thaler and Ravishankar, 1998).
        """
        score = scores[slots]
        tied = slots[score <= score.min() * TIED]
        if len(tied) == 1:
            return int(tied[0])
        ask = self._ask
        depth = int((self._resident[tied] / self.costs.page_tokens[tied]).max())
        known = depth >= len(ask.keys)
        family = blake2b(ask.request_id.encode(), digest_size=8).digest() if known else ask.keys[depth]
        names = self._table[Column.NAME, tied].astype(np.uint64)
        mixed = (names ^ cut_keys([family])) * SPREAD
        mixed = (mixed ^ (mixed >> np.uint64(32))) * SPREAD
        return int(tied[np.argmax(mixed ^ (mixed >> np.uint64(29)))])

    def best_prefill(self, slots: Chosen) -> _Prefill:
        done = self.costs.wait + self.costs.serving(self._restorable, self._stored, self.boundary)
        best = self.pick(slots, done + self._staying(slots, self.boundary))
        return _Prefill(self._fleet.at(best), float(done[best]), float(self._resident[best]))

    def streams(self, prefill: _Prefill | None) -> _Streams:
        """Score every worker's stream; `prefill` is the best prefill worker."""
        costs, end = self.costs, self._ask.num_tokens
        mixed = self._table[Column.MIXED] > 0
        here = np.where(mixed, self._restorable, self._announced)
        own = costs.serving(here, self._stored, end) * self._beside
        short = np.minimum(GAP_PAGES_MAX * costs.page_tokens, np.maximum(costs.page_tokens, GAP_TOKENS_MIN))
        alone = mixed | (end - here <= short)
        mixing = np.flatnonzero(mixed)
        home = self._staying(mixing, end) * self._beside if len(mixing) else 0.0
        if prefill is None:
            alone[:] = True
            first = costs.wait + own + costs.step
            return _Streams(first + np.where(mixed, home, 0.0) + self._crowding(), first, alone)
        if costs.in_seconds:
            away = (prefill.resident < HOME_SHARE * end) | (here >= prefill.resident)
            quick = costs.computing(here, end) * self._beside <= GAP_S_MAX
            alone |= away & quick & (own <= prefill.done)
        namespace = self._table[Column.NAMESPACE]
        alone |= namespace != namespace[prefill.member.slot]  # another version cannot use its pages
        pages = np.maximum(0.0, self.boundary - self._restorable) / costs.page_tokens
        late = np.minimum(pages, np.ceil(costs.step_tokens / costs.page_tokens))  # pages of the last step
        hop = HOP_S if costs.in_seconds else HOP_PAGES * costs.page_tokens
        fetched = late * costs.page + np.sign(pages) * costs.state  # the other pages arrive while it computes
        by_hop = prefill.done + hop + fetched + costs.computing(self.boundary, end) * self._beside
        first = costs.wait + np.where(alone, own, by_hop) + costs.step
        stays = np.where(mixed, home, (pages - late) * costs.page)
        return _Streams(first + stays + self._crowding(), first, alone)

    def prompt(self, index: int, end: int) -> Booking:
        """Return the booking of one slot for computing the prompt up to `end`."""
        seconds = self.costs.serving(self._restorable, self._stored, end) * self._beside
        return Booking(
            tokens=self._ask.num_tokens - int(self._restorable[index]),
            rows=1,
            at_s=self._now_s,
            due_s=self._now_s,
            seconds=float(seconds[index]) if self.costs.in_seconds else 0.0,
            num_bytes=int(self.needed_bytes()[index]),
            keys=self._ask.keys,
        )

    def needed_bytes(self) -> Vector:
        """Return the bytes that prompt and answer take."""
        table, ask = self._table, self._ask
        answer = np.sign(table[Column.DECODES]) * min(ask.max_new_tokens, ANSWER_TOKENS)
        pages = np.ceil((ask.num_tokens + answer) / table[Column.PAGE_TOKENS])
        return pages * table[Column.PAGE_BYTES] + table[Column.STATE_BYTES]

    def _staying(self, slots: Chosen, end: int) -> Vector:
        """Return the cost to later requests when this prompt is computed there, beyond the cost at the best
        of `slots`, up to the request's patience.
        """
        stays = self._kappa * self.costs.serving(self._resident, self._stored, end)
        second = 1.0 if self.costs.in_seconds else TOKENS_PER_S
        patience = PATIENCE_S * second + self.costs.wait[slots].min()
        return np.minimum(stays - stays[slots].min(), patience)

    def _crowding(self) -> Vector:
        """Return the mutual delay with the rows beside it, and the cost of short memory."""
        table, costs = self._table, self.costs
        rows, budget = table[Column.ROWS], table[Column.BUDGET_BYTES]
        taken = (table[Column.TAKEN_BYTES] + self.needed_bytes()) / np.maximum(budget, 1.0)
        taken = np.where(budget > 0, taken, 0.0)
        overfull = np.where(taken > 1, OVERFULL_S * taken, 0.0)
        if not costs.in_seconds:
            return rows * costs.row + overfull * TOKENS_PER_S
        slowed = 2 * min(self._ask.max_new_tokens, ANSWER_TOKENS) * rows * costs.row
        filled = np.minimum(taken, FILLED_MAX)
        return slowed + FULL_S * filled / (1 - filled) + overfull
