"""Whose turn it is among tenants: start-time fair queueing, in one number for each request. Pure.

Every tenant has a line of its work, in tokens; a request begins in it where the one before ends, but not
before the virtual time, which is where all lines together hold what is queued in the fleet:

    tenant a   =====|=====|=====|=====|          a request that begins here goes first ...
    tenant b   ==|                               ... and one of b that begins here before most of a's
               ^ virtual time

So whoever asks for less than an equal share of the fleet waits for its own requests alone, and nobody is
passed for ever: the virtual time moves on as work is done, and nothing new begins behind it. The place in
line as a time: that at which the longest line reached it. Alone, a tenant is in order of arrival.

After P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996; the virtual time is read off the
queue, so that no speed has to be known.
"""

from bisect import bisect_left
from collections import deque
from itertools import accumulate, pairwise

TENANTS_MAX = 1024
"""With work queued at once. Beyond, the one with the least of it is forgotten: it begins anew, at its
advantage."""

POINTS_MAX = 512
POINT_S = 0.25
"""How finely the past of the longest line is known; POINTS_MAX of them are more than two minutes."""


class FairQueue:
    """Lines of tenants that have work queued; all else is forgotten."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}  # of lines, all beyond the virtual time
        self._virtual = 0.0
        self._points = deque[tuple[float, float]](maxlen=POINTS_MAX)  # (start, time) of the longest line
        self._tip = (0.0, 0.0)  # the same, of its last request

    def advance(self, queued: float) -> None:
        """So much work is queued in the fleet now: the virtual time is where the lines beyond it hold no
        more than that. It never goes back."""
        ends = sorted(self._ends.values(), reverse=True)
        for count, total in enumerate(accumulate(ends), 1):
            level = (total - queued) / count
            below = ends[count] if count < len(ends) else self._virtual
            if level >= below:
                self._virtual = max(self._virtual, level)
                break
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._virtual}

    def ahead(self, tenant: str, work: float) -> float:
        """The part of all queued work that is done before a request of so much `work`, at equal shares."""
        start = self._start(tenant)
        total = sum(end - self._virtual for end in self._ends.values())
        others = (min(end, start + work) for other, end in self._ends.items() if other != tenant)
        before = start - self._virtual + sum(end - self._virtual for end in others)
        return before / total if total else 1.0

    def charge(self, tenant: str, work: float, now_s: float) -> float:
        """Append a request to its tenant's line; how much later than others it goes, in seconds: 0 at the end
        of the longest line, negative elsewhere."""
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
        """When the longest line began a request there."""
        path = [*self._points, self._tip]
        after = bisect_left(path, (start, 0.0))
        if after == 0:
            return path[0][1]
        (start_a, at_a_s), (start_b, at_b_s) = path[after - 1], path[after]
        return at_a_s + (at_b_s - at_a_s) * (start - start_a) / (start_b - start_a)
