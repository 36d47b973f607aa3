"""The master of the fake Mooncake: only metadata of objects and owners, without waits."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

OK = 0
NO_SPACE = -200
INVALID = -600
MISSING = -704
EXPIRED = -707
OWNER_FAILED = -800
MASTER_FAILED = -900

CLIENT_TTL_S = 10.0  # the silence after which an owner and its objects are forgotten
DISCARD_S = 30.9  # the time for which an unfinished object keeps its name
REMOUNT_S = 1.0
EVICTION_S_MAX = 0.1  # from a refusal to the eviction that it triggers
FULL_AT = 0.95
EVICTED_TO = 0.85


@dataclass(eq=False, kw_only=True)
class Owner:
    """A process that lends memory, usable from `mounts_at` on, crashed or frozen since `silent_since`."""

    capacity_bytes: int
    mounts_at: float = 0.0
    silent_since: float | None = None
    is_dead: bool = False
    is_frozen: bool = False

    @property
    def is_silent(self) -> bool:
        return self.silent_since is not None


@dataclass(eq=False, kw_only=True)
class Entry:
    name: str
    owner: Owner
    body: bytearray  # in the memory of its owner
    began: float
    is_complete: bool = False
    leased_until: float = 0.0


class Master:
    """Keeps entries only in memory."""

    def __init__(self, rng: Random, clock: Callable[[], float], lease_s: float) -> None:
        self.entries: dict[str, Entry] = {}
        self.owners: list[Owner] = []
        self._rng, self._clock, self._lease_s = rng, clock, lease_s
        self._evicts_at: float | None = None

    def forget(self) -> None:
        """Restart as a new process without entries. Its owners come back by themselves."""
        self.entries.clear()
        self._evicts_at = None
        self.owners = [owner for owner in self.owners if not owner.is_dead]
        for owner in self.owners:
            owner.mounts_at = self._clock() + REMOUNT_S

    def begin_put(self, name: str, num_bytes: int) -> Entry | int:
        self.advance()
        largest = max((owner.capacity_bytes for owner in self.owners), default=0)
        if not name or not 0 < num_bytes <= largest:
            return INVALID
        there = self.entries.get(name)
        if there is not None and (there.is_complete or self._clock() - there.began < DISCARD_S):
            return OK  # for any writer, even if it never finishes
        free = [owner for owner in self._mounted() if self._free_bytes(owner) >= num_bytes]
        if self._used() > FULL_AT or not free:
            self._evict_soon()
        if not free:
            return NO_SPACE
        entry = Entry(name=name, owner=self._rng.choice(free), body=bytearray(num_bytes), began=self._clock())
        self.entries[name] = entry
        return entry

    def end_put(self, entry: Entry) -> int:
        self.advance()
        if self.entries.get(entry.name) is not entry:
            return MISSING
        entry.is_complete = True
        return OK

    def revoke_put(self, entry: Entry) -> None:
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]

    def query(self, name: str) -> Entry | int:
        """Return the entry, and lease it: it is not evicted before the lease expires."""
        self.advance()
        entry = self.entries.get(name)
        if entry is None or not entry.is_complete:
            return MISSING
        entry.leased_until = self._clock() + self._lease_s
        return entry

    def remove(self, name: str) -> int:
        """Remove by force, also while leased."""
        self.advance()
        entry = self.entries.get(name)
        if entry is None or not entry.is_complete:
            return MISSING
        del self.entries[name]
        return OK

    def advance(self) -> None:
        """Run the events that are due. Every other method does so first."""
        now = self._clock()
        for owner in list(self.owners):
            if owner.silent_since is not None and now - owner.silent_since >= CLIENT_TTL_S:
                self.owners.remove(owner)
                for entry in list(self.entries.values()):
                    if entry.owner is owner:
                        del self.entries[entry.name]
        if self._evicts_at is not None and now >= self._evicts_at:
            self._evicts_at = None
            self._evict()

    def _evict(self) -> None:
        """Evict by end of lease. Objects that were never read have none, so the newest go first."""
        now = self._clock()
        victims = [
            entry for entry in self.entries.values() if entry.is_complete and entry.leased_until <= now
        ]
        for entry in sorted(victims, key=lambda entry: entry.leased_until):
            if self._used() <= EVICTED_TO:
                return
            del self.entries[entry.name]

    def _evict_soon(self) -> None:
        if self._evicts_at is None:
            self._evicts_at = self._clock() + self._rng.random() * EVICTION_S_MAX

    def _mounted(self) -> list[Owner]:
        return [owner for owner in self.owners if owner.mounts_at <= self._clock()]

    def _free_bytes(self, owner: Owner) -> int:
        used = sum(len(entry.body) for entry in self.entries.values() if entry.owner is owner)
        return owner.capacity_bytes - used

    def _used(self) -> float:
        capacity = sum(owner.capacity_bytes for owner in self.owners)
        return sum(len(entry.body) for entry in self.entries.values()) / max(1, capacity)
