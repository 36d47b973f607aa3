"""Start-time fair queueing among tenants, as one number for each request. Pure.

Each tenant has a queue of its work, in tokens. A request starts where the previous one of its
tenant ends, but not before the virtual time. Beyond the virtual time, all queues together hold the
work that is queued in the fleet:

    tenant a   =====|=====|=====|=====|
    tenant b   ==|     a new request of b starts here, before most of a's
               ^ virtual time

A tenant that requests less than an equal share of the fleet waits only for its own requests. No
request waits forever: the virtual time advances as work is done, and no new request starts before
it. A start is turned into a time: the time at which the longest queue reached it. A tenant without
competition is served in order of arrival.

After P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996. The virtual time is
derived from the queued work, so that no speed has to be known.
"""

from bisect import bisect_left
from collections import deque
from itertools import accumulate, pairwise

TENANTS_MAX = 1024
"""The maximum number of tenants with queued work. Beyond it the tenant with the least is forgotten, and its
next request starts at the virtual time."""

POINTS_MAX = 512
POINT_S = 0.25
"""The resolution of the longest queue's history, which covers more than two minutes."""


class FairQueue:
    """The queues of the tenants that have queued work."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}  # of the queues, all beyond the virtual time
        self._virtual = 0.0
        self._points = deque[tuple[float, float]](maxlen=POINTS_MAX)  # (start, time) of the longest queue
        self._tip = (0.0, 0.0)  # (start, time) of its last request

    def advance(self, queued: float) -> None:
        """Advance the virtual time to where the queues beyond it hold `queued` tokens of work."""
        ends = sorted(self._ends.values(), reverse=True)
        for count, total in enumerate(accumulate(ends), 1):
            level = (total - queued) / count
            below = ends[count] if count < len(ends) else self._virtual
            if level >= below:
                self._virtual = max(self._virtual, level)
                break
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._virtual}

    def ahead(self, tenant: str, work: float) -> float:
        """Return the share of all queued work that is done before a request of `work` tokens."""
        start = self._start(tenant)
        total = sum(end - self._virtual for end in self._ends.values())
        others = (min(end, start + work) for other, end in self._ends.items() if other != tenant)
        before = start - self._virtual + sum(end - self._virtual for end in others)
        return before / total if total else 1.0

    def charge(self, tenant: str, work: float, now_s: float) -> float:
        """Append a request to the queue of its tenant and return its queue offset in seconds. The offset is 0
        at the end of the longest queue and negative elsewhere."""
        start = self._start(tenant)
        self._ends[tenant] = start + work
        if len(self._ends) > TENANTS_MAX:
            del self._ends[min(self._ends, key=self._ends.__getitem__)]
        if start >= self._tip[0]:
            self._tip = (start, now_s)
            if not self._points or now_s - self._points[-1][1] >= POINT_S:
                self._points.append(self._tip)
            return 0.0
        return self._reached_s(start) - now_s

    def check(self) -> None:
        assert all(end >= self._virtual for end in self._ends.values())
        assert len(self._ends) <= TENANTS_MAX
        path = [*self._points, self._tip]
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(path))

    def _start(self, tenant: str) -> float:
        return max(self._virtual, self._ends.get(tenant, self._virtual))

    def _reached_s(self, start: float) -> float:
        """Return the time at which the longest queue started a request there."""
        path = [*self._points, self._tip]
        after = bisect_left(path, (start, 0.0))
        if after == 0:
            return path[0][1]
        (start_a, at_a_s), (start_b, at_b_s) = path[after - 1], path[after]
        return at_a_s + (at_b_s - at_a_s) * (start - start_a) / (start_b - start_a)
