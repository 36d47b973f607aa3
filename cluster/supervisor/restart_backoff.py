"""How long the next life of a worker waits that died soon, again and again. Pure."""

SOON_S = 10.0
"""A life that ended within this time of its start was of no use."""

WAIT_S_MAX = 30.0


class Backoff:
    """0, 0, 1, 2, 4 ... 30 seconds for the first life and those after lives that died soon; 0 after one that
    lived."""

    def __init__(self) -> None:
        self._lives: dict[str, tuple[int, float]] = {}  # of each name, how many died soon; when one starts

    def begin(self, name: str, now_s: float) -> float:
        """A life of `name` begins: how long it shall wait before its start."""
        before = self._lives.get(name)
        failures = 0 if before is None or now_s - before[1] > SOON_S else before[0] + 1
        wait_s = 0.0 if failures < 2 else min(WAIT_S_MAX, 2.0 ** (failures - 2))
        self._lives[name] = failures, now_s + wait_s
        return wait_s
