"""Rates of requests by the generic cell rate algorithm (ITU-T I.371). Pure."""

from typing import NamedTuple

MINUTE_S = 60.0
NAMES_MAX = 10_000
"""Beyond this number of names, those that have paid for nothing ahead are forgotten."""


class Counted(NamedTuple):
    """The time that a refused request must wait, 0 if it was counted, and how far its name has paid ahead."""

    wait_s: float
    ahead_s: float


class Rates:
    """The state of each name. A request pays for its share of a minute, and a name may pay for a minute
    ahead."""

    def __init__(self) -> None:
        self._paid_until_s: dict[str, float] = {}

    def count(self, name: str, per_minute: int, now_s: float, ahead_s: float = 0.0) -> Counted:
        """Count a request if it may be counted. At another counter the name has paid `ahead_s` ahead."""
        cost_s = MINUTE_S / per_minute
        paid_ahead_s = max(ahead_s, self.ahead_s(name, now_s))
        wait_s = paid_ahead_s + cost_s - MINUTE_S
        if wait_s > 1e-9:
            return Counted(wait_s, paid_ahead_s)
        return Counted(0.0, self.charge(name, cost_s, now_s, paid_ahead_s))

    def charge(self, name: str, cost_s: float, now_s: float, ahead_s: float = 0.0) -> float:
        """Count what cannot be refused any more; return how far the name has paid ahead then."""
        paid_ahead_s = max(ahead_s, self.ahead_s(name, now_s)) + cost_s
        self.note(name, now_s, paid_ahead_s)
        return paid_ahead_s

    def ahead_s(self, name: str, now_s: float) -> float:
        return max(0.0, self._paid_until_s.get(name, 0.0) - now_s)

    def note(self, name: str, now_s: float, ahead_s: float) -> None:
        """Note how far a name has paid ahead at another counter; it never falls."""
        if len(self._paid_until_s) > NAMES_MAX:
            self._paid_until_s = {name: until for name, until in self._paid_until_s.items() if until > now_s}
        self._paid_until_s[name] = max(self._paid_until_s.get(name, 0.0), now_s + ahead_s)
