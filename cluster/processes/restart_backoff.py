"""Exponential backoff for workers that crash shortly after starting. Pure."""

SOON_S = 10.0
"""An incarnation that ends within this time of its start counts as a failure."""

WAIT_S_MAX = 30.0


class Backoff:
    """The restart delays of named workers: 0, 0, 1, 2, 4 ... 30 s over consecutive short incarnations. An
    incarnation that lasts longer resets the delay to 0."""

    def __init__(self) -> None:
        self._starts: dict[str, tuple[int, float]] = {}  # name: consecutive failures, start of the latest

    def begin(self, name: str, now_s: float) -> float:
        """Record that an incarnation of `name` begins; return the seconds that it must wait first."""
        latest = self._starts.get(name)
        failures = 0 if latest is None or now_s - latest[1] > SOON_S else latest[0] + 1
        wait_s = 0.0 if failures < 2 else min(WAIT_S_MAX, 2.0 ** (failures - 2))
        self._starts[name] = failures, now_s + wait_s
        return wait_s
