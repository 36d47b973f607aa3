"""Refuses requests whose content recently crashed workers, for some minutes. Pure."""

from tidemill.workers.messages import Poisonous

QUARANTINE_S = 600.0
CONTENTS_MAX = 1024
"""The oldest contents are dropped first; an attacker with this many poisons has more anyway."""


class Quarantine:
    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}  # the oldest first

    def add(self, content: bytes, now_s: float) -> None:
        self._until_s.pop(content, None)
        self._until_s[content] = now_s + QUARANTINE_S
        while len(self._until_s) > CONTENTS_MAX:
            del self._until_s[next(iter(self._until_s))]

    def check(self, content: bytes, now_s: float) -> None:
        """Raise Poisonous for quarantined content."""
        until_s = self._until_s.get(content)
        if until_s is not None and now_s < until_s:
            raise Poisonous("workers were lost with this request a short while ago: it is not tried again")
