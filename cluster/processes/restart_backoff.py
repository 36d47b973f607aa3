"""Exponential backoff for workers that crash while they start, or shortly after. Pure."""

from math import inf

SOON_S = 10.0
"""An incarnation that lasts no longer counts as a failure."""

WAIT_S_MAX = 30.0


class Backoff:
    """The restart delays of named workers: 0, 0, 1, 2, 4 ... 30 s over consecutive short incarnations. An
    incarnation that lasts longer resets the delay to 0."""

    def __init__(self, *, lasts_from_ready: bool = False) -> None:
        """An incarnation lasts from its start, or from `ready`: loading a model takes any time."""
        self._lasts_from_ready = lasts_from_ready
        self._latest: dict[str, tuple[int, float]] = {}  # name: consecutive failures, since when it lasts

    def begin(self, name: str, now_s: float) -> float:
        """Record that an incarnation of `name` begins; return the seconds that it must wait first."""
        latest = self._latest.get(name)
        failures = 0 if latest is None or now_s - latest[1] > SOON_S else latest[0] + 1
        wait_s = 0.0 if failures < 2 else min(WAIT_S_MAX, 2.0 ** (failures - 2))
        self._latest[name] = failures, inf if self._lasts_from_ready else now_s + wait_s
        return wait_s

    def ready(self, name: str, now_s: float) -> None:
        """Record that the incarnation of `name` serves; a report over a new connection changes nothing."""
        failures, since_s = self._latest.get(name, (0, inf))
        self._latest[name] = failures, min(since_s, now_s)
