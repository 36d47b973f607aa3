"""Whether a request is taken at all, and where it stands among those of other tenants. Pure.

Refusing is cheap and early: a request that would wait longer than its client does is told so at once, with
the time after which asking again makes sense. Queues are therefore bounded in seconds, whatever the load.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from tidemill.cluster.messages import TTFT_S_MAX, PlacementRequest, Route
from tidemill.cluster.router.fair_queueing import FairQueue
from tidemill.cluster.router.fleet_view import RequestBooked
from tidemill.workers.messages import Overloaded

LOOK_S = 0.1
"""How often the work queued in the whole fleet is added up."""

RETRY_S_MIN, RETRY_S_MAX = 1.0, 60.0

BEGUN_S = 3600.0
"""A request that was taken before, and lost its worker, goes before all that came in the last hour: its
client is reading."""


class LoadView(Protocol):
    """Prompt tokens not yet computed, reported and booked."""

    def queued_tokens_of_all(self) -> float: ...


class LoadShedder:
    """Mutable are the tenants' lines alone; a router that starts again begins with none."""

    def __init__(self, ttft_s_max: float = TTFT_S_MAX) -> None:
        self._ttft_s_max = ttft_s_max
        self._shares = FairQueue()
        self._looked_at_s = -math.inf

    def patience_s(self, ask: PlacementRequest) -> float:
        """How long a request may wait for its first token; one that was taken before, for ever."""
        if ask.ttft_s_max == math.inf:
            return math.inf
        return self._ttft_s_max if ask.ttft_s_max is None else min(ask.ttft_s_max, self._ttft_s_max)

    def admit(
        self,
        ask: PlacementRequest,
        route: Route,
        view: LoadView,
        booked: Sequence[RequestBooked],
        now_s: float,
    ) -> Route:
        """The route with the request's place among others, and the time that it takes from there.

        `booked` is the work of the request on the workers of the route, in seconds too where their speed is
        known. A deadline of the client's own is for the prediction; the server's is for the wait behind
        others, so that an idle fleet serves prompts of any length. Raises Overloaded; nothing has changed
        then.
        """
        if ask.ttft_s_max == math.inf:
            return replace(route, queue_offset_s=-BEGUN_S)
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self._shares.advance(view.queued_tokens_of_all())
        first = next(
            booked_on.booking for booked_on in booked if booked_on.worker == (route.prefill or route.decode)
        )
        work = sum(booked_on.booking.tokens for booked_on in booked)
        own_s = min(first.seconds, route.predicted_s)
        wait_s = (route.predicted_s - own_s) * self._shares.ahead(ask.tenant, work)
        predicted_s = wait_s + own_s
        limit_s = self.patience_s(ask)
        if (wait_s if ask.ttft_s_max is None else predicted_s) > limit_s:
            raise Overloaded(
                f"the first token would come after {predicted_s:.1f} s, and may take {limit_s:g} s: "
                "ask again later, or let it wait longer (x-slo-ttft-ms, --ttft-max)",
                predicted_s=predicted_s,
                retry_after_s=_retry_after_s(predicted_s - limit_s, ask.request_id),
            )
        queue_offset_s = self._shares.charge(ask.tenant, work, now_s)
        return replace(route, predicted_s=predicted_s, queue_offset_s=queue_offset_s)


def _retry_after_s(excess_s: float, request_id: str) -> float:
    """When the queue is short enough if nobody else comes, and up to twice as late: those that were refused
    together shall not come back together."""
    spread = int.from_bytes(blake2b(request_id.encode(), digest_size=4).digest(), "little") / 2**32
    return min(max(excess_s, RETRY_S_MIN) * (1.0 + spread), RETRY_S_MAX)
