"""Admission: refuse requests that would wait too long, and order the others by tenant. Pure.

A refusal is cheap and early: a client whose deadline would pass gets an error immediately, with the
time after which a retry makes sense. Without a limit, of the server or of the client, nothing is
refused for being slow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.fair_queueing import FairQueue
from tidemill.cluster.router.fleet_view import RequestBooked
from tidemill.workers.messages import Overloaded

LOOK_S = 0.1
"""The interval between two sums of the queued work of the fleet."""

RETRY_S_MIN, RETRY_S_MAX = 1.0, 60.0

HEAD_START_S = 3600.0
"""The head start of a resumed request, the answer of which its client already reads."""


class LoadShedder:
    """Refuses requests with too long a wait. Its only state is the queues of the tenants."""

    def __init__(self, ttft_s_max: float = math.inf) -> None:
        self._ttft_s_max = ttft_s_max
        self._fair_queue = FairQueue()
        self._advanced_at_s = -math.inf

    def patience_s(self, request: PlacementRequest) -> float:
        """Return the longest time to first token of a request: infinite for a resumed one."""
        if request.resumed:
            return math.inf
        return self._ttft_s_max if request.ttft_s_max is None else min(request.ttft_s_max, self._ttft_s_max)

    def admit(
        self,
        request: PlacementRequest,
        route: Route,
        queued_tokens: Callable[[], float],
        booked: Sequence[RequestBooked],
        now_s: float,
    ) -> Route:
        """Return the route with queue offset and predicted time to first token.

        `queued_tokens` returns the prompt tokens of the fleet not yet computed, reported or booked.
        `booked` is the work of the request on the workers of the route. The deadline of the client
        limits the whole prediction. The limit of the server applies only to the wait for other
        requests, so that an idle fleet serves prompts of any length. Raises Overloaded, without a
        change of state.
        """
        if request.resumed:
            return replace(route, queue_offset_s=-HEAD_START_S)
        if now_s - self._advanced_at_s >= LOOK_S:
            self._advanced_at_s = now_s
            self._fair_queue.advance(queued_tokens())
        first = next(event.booking for event in booked if event.worker == (route.prefill or route.decode))
        work = sum(event.booking.tokens for event in booked)
        own_s = min(first.seconds, route.predicted_s)
        wait_s = (route.predicted_s - own_s) * self._fair_queue.ahead(request.tenant, work)
        predicted_s = wait_s + own_s
        limit_s = self.patience_s(request)
        if (wait_s if request.ttft_s_max is None else predicted_s) > limit_s:
            raise Overloaded(
                f"the predicted time to first token is {predicted_s:.1f} s, the limit is {limit_s:g} s: "
                "retry later, or raise the limit (x-slo-ttft-ms, --ttft-max)",
                predicted_s=predicted_s,
                retry_after_s=_retry_after_s(predicted_s - limit_s, request.request_id),
            )
        queue_offset_s = self._fair_queue.charge(request.tenant, work, now_s)
        return replace(route, predicted_s=predicted_s, queue_offset_s=queue_offset_s)


def _retry_after_s(excess_s: float, request_id: str) -> float:
    """Return the time until the queue is short enough without new requests, or up to twice that. The spread
    keeps clients that were refused together from retrying together."""
    spread = int.from_bytes(blake2b(request_id.encode(), digest_size=4).digest(), "little") / 2**32
    return min(max(excess_s, RETRY_S_MIN) * (1.0 + spread), RETRY_S_MAX)
