"""Decides whether the router admits a request, and its position among those of other tenants. Pure.

Refusing is cheap and early: a request that would wait longer than its client does is refused immediately,
with the time after which a retry makes sense.
Queues are therefore bounded in seconds, whatever the load.
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
"""The interval at which the work queued in the whole fleet is added up."""

RETRY_S_MIN, RETRY_S_MAX = 1.0, 60.0

BEGUN_S = 3600.0
"""A request that was admitted before and lost its worker precedes all that arrived in the last hour,
because its client is already reading.
"""


class LoadView(Protocol):
    """Prompt tokens not yet computed, reported and booked."""

    def queued_tokens_of_all(self) -> float: ...


class LoadShedder:
    """Only the tenants' lines are mutable; a restarted router begins with none."""

    def __init__(self, ttft_s_max: float = TTFT_S_MAX) -> None:
        self._ttft_s_max = ttft_s_max
        self._shares = FairQueue()
        self._looked_at_s = -math.inf

    def patience_s(self, ask: PlacementRequest) -> float:
        """Return the seconds that a request may wait for its first token: unlimited if it was admitted
        before.
        """
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
        """Return the route with the request's queue offset and its predicted time from there.

        `booked` is the work of the request on the workers of the route, in seconds too where their speed is
        known.
        A client's own deadline is compared with the prediction, the server's with the wait behind others,
        so that an idle fleet serves prompts of any length.
        Raises Overloaded, and changes nothing then.
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
    """Return the time until the queue is short enough without new requests, times 1 to 2: requests that are
    refused together must not return together.
    """
    spread = int.from_bytes(blake2b(request_id.encode(), digest_size=4).digest(), "little") / 2**32
    return min(max(excess_s, RETRY_S_MIN) * (1.0 + spread), RETRY_S_MAX)
