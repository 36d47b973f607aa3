"""Start-time fair queueing among tenants, in one number per request. Pure.

Every tenant has a line of its work, in tokens.
A request begins where its tenant's last one ends, but not before the virtual time: there all lines together
hold what is queued in the fleet.

    tenant a   =====|=====|=====|=====|          a request that begins here goes first ...
    tenant b   ==|                               ... and one of b that begins here before most of a's
               ^ virtual time

A tenant that asks for less than an equal share of the fleet waits only for its own requests.
No request is passed forever: the virtual time advances as work is done, and no new request begins behind
it.
The queue offset is the time at which the longest line reached the request's position.
A single tenant is served in order of arrival.

After P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
The virtual time is read off the queue, so that no speed has to be known.
"""

from bisect import bisect_left
from collections import deque
from itertools import accumulate, pairwise

TENANTS_MAX = 1024
"""The number of tenants with queued work. Beyond it, the tenant with the least work is forgotten and starts
again, to its advantage.
"""

POINTS_MAX = 512
POINT_S = 0.25
"""The resolution of the longest line's history; POINTS_MAX points cover more than two minutes."""


class FairQueue:
    """The lines of tenants that have work queued; all other tenants are forgotten."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}  # the ends of lines, all beyond the virtual time
        self._virtual = 0.0
        self._points = deque[tuple[float, float]](maxlen=POINTS_MAX)  # (start, time) of the longest line
        self._tip = (0.0, 0.0)  # (start, time) of its last request

    def advance(self, queued: float) -> None:
        """Set the virtual time for `queued` tokens of work in the fleet: the lines beyond it hold no more
        than that.
        It never goes back.
        """
        ends = sorted(self._ends.values(), reverse=True)
        for count, total in enumerate(accumulate(ends), 1):
            level = (total - queued) / count
            below = ends[count] if count < len(ends) else self._virtual
            if level >= below:
                self._virtual = max(self._virtual, level)
                break
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._virtual}

    def ahead(self, tenant: str, work: float) -> float:
        """Return the part of all queued work that precedes a request of `work` tokens, at equal shares."""
        start = self._start(tenant)
        total = sum(end - self._virtual for end in self._ends.values())
        others = (min(end, start + work) for other, end in self._ends.items() if other != tenant)
        before = start - self._virtual + sum(end - self._virtual for end in others)
        return before / total if total else 1.0

    def charge(self, tenant: str, work: float, now_s: float) -> float:
        """Append a request to its tenant's line and return its queue offset in seconds.
        It is 0 at the end of the longest line and negative elsewhere.
        """
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
        """Return when the longest line began a request at `start`."""
        path = [*self._points, self._tip]
        after = bisect_left(path, (start, 0.0))
        if after == 0:
            return path[0][1]
        (start_a, at_a_s), (start_b, at_b_s) = path[after - 1], path[after]
        return at_a_s + (at_b_s - at_a_s) * (start - start_a) / (start_b - start_a)
