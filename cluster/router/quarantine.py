"""The quarantine: rejects requests whose content recently crashed workers. Pure."""

from tidemill.workers.messages import Poisonous

QUARANTINE_S = 600.0
CONTENTS_MAX = 1024
"""Beyond this number the oldest are dropped: an attacker with as many contents has more of them."""


class Quarantine:
    """The content hashes that crashed workers, for `QUARANTINE_S` each."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}  # by content hash, the oldest first

    def add(self, content_hash: bytes, now_s: float) -> None:
        self._until_s.pop(content_hash, None)
        self._until_s[content_hash] = now_s + QUARANTINE_S
        while len(self._until_s) > CONTENTS_MAX:
            del self._until_s[next(iter(self._until_s))]

    def check(self, content_hash: bytes, now_s: float) -> None:
        """Raise Poisonous if this content is in quarantine."""
        until_s = self._until_s.get(content_hash)
        if until_s is not None and now_s < until_s:
            raise Poisonous("workers were lost with this request recently: it is not tried again")
