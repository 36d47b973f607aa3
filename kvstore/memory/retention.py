"""Credits that clients ask for: for how long the prefixes of a prompt are worth keeping.

    tenant a   [page or checkpoint, until] [page or checkpoint, until] ...   the oldest use first
    tenant b   [page or checkpoint, until] ...

A credit counts as RETAINED_USES uses, fades to nothing until its end, and begins again with each use.
The tenant pays what its credits keep: the pages of their paths, each once, and their checkpoints. It may pay
as much as all tenants leave free: alone half of the memory, two a third each. Some memory is always without
credits, so no tenant pushes out the others.
"""

import heapq
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.entry import Entry
from tidemill.kvstore.memory.prefix_index import PrefixIndex

NOTES_MAX = 256
"""The number of notes of credits that were dropped, beyond one for each credit."""


@dataclass(slots=True, eq=False)
class Credit:
    """A credit of one tenant on one entry. It costs the pages of its path, and `own_bytes` for a checkpoint.
    `names` has the sessions and prefixes that asked for it, and an empty one for requests without a name."""

    retain_s: float
    own_bytes: int
    until_s: float = 0.0
    names: set[str] = field(default_factory=set[str])


@dataclass(slots=True, eq=False)
class TenantCredits:
    """The credits of one tenant.

    credits     by entry, the oldest use first
    named       the entries with a credit, by session or prefix
    pages       the pages paid for; each with the number of its credits and of paid pages right below it
    """

    credits: dict[Entry, Credit] = field(default_factory=dict[Entry, Credit])
    named: dict[str, set[Entry]] = field(default_factory=dict[str, set[Entry]])
    pages: dict[Entry, int] = field(default_factory=dict[Entry, int])
    own_bytes: int = 0


class Retention:
    """The credits of all tenants on the entries of an index."""

    def __init__(self, index: PrefixIndex, layout: Layout, budget_bytes: Callable[[], int]) -> None:
        self._index = index
        self._layout = layout
        self._budget_bytes = budget_bytes
        self._accounts: dict[str, TenantCredits] = {}
        self._payers: dict[Entry, set[str]] = {}
        self._ends: list[tuple[float, int, str, Entry, Credit]] = []
        self._serial = 0

    def advance(self, now_s: float) -> None:
        """Set the time, and drop the credits that have ended."""
        self._index.now_s = now_s
        while self._ends and self._ends[0][0] <= now_s:
            _, _, tenant, entry, credit = heapq.heappop(self._ends)
            if self._credit(tenant, entry) is not credit:
                continue
            if credit.until_s > now_s:  # it was used since
                self._watch(tenant, entry, credit)
            else:
                self._drop(tenant, entry)
                entry.retained_s = entry.retained_s or credit.retain_s

    def retain(
        self, tenant: str, name: str, path: Sequence[Entry], retain_s: float, depths_pages: AbstractSet[int]
    ) -> None:
        """Give what is restorable of `path` a credit for `retain_s`: all pages, or of a hybrid the last
        checkpoint and those at `depths_pages`.

        The credits that `name` had before are dropped, unless it is empty. Credits beyond the share of the
        tenant are dropped: those used longest ago, and of one path the deepest first.
        """
        found = [entry for entry in reversed(path) if self._index.is_restorable(entry) and entry.uses]
        if self._layout.hybrid:
            found = found[:1] + [entry for entry in found[1:] if entry.depth_pages in depths_pages]
        if name:
            self._unname(tenant, name, set(found))
        account = self._accounts.setdefault(tenant, TenantCredits()) if found else TenantCredits()
        for entry in found:
            credit = account.credits.pop(entry, None) or self._open(tenant, account, entry)
            alone = credit.names <= {name}  # the latest request of a name decides
            credit.retain_s = retain_s if alone else max(credit.retain_s, retain_s)
            noted_s, credit.until_s = credit.until_s, self._index.now_s + credit.retain_s
            credit.names.add(name)
            if name:
                account.named.setdefault(name, set()).add(entry)
            account.credits[entry] = credit
            if not noted_s or credit.until_s < noted_s:
                self._watch(tenant, entry, credit)
            self._refresh(entry)
        left_bytes = self._budget_bytes() - (self.total_bytes() - self.paid_bytes(tenant))
        while account.credits and 2 * self.paid_bytes(tenant) > left_bytes:
            self._drop(tenant, next(iter(account.credits)))

    def renew(self, path: Sequence[Entry]) -> None:
        """Let the credits of a path that a request uses begin again: of a hybrid, the last one."""
        if not self._payers:
            return
        for entry in path[-1:] if self._layout.hybrid else path:
            for tenant in self._payers.get(entry, ()):
                by_use = self._accounts[tenant].credits
                credit = by_use[entry] = by_use.pop(entry)
                credit.until_s = self._index.now_s + credit.retain_s
                self._refresh(entry)

    def release(self, tenant: str, name: str) -> None:
        """Drop the credits that only `name` asked for."""
        self._unname(tenant, name, set())

    def forget(self, entry: Entry) -> None:
        """Drop all credits of an entry: it, or its checkpoint, is evicted."""
        for tenant in list(self._payers.get(entry, ())):
            self._drop(tenant, entry)

    def paid_bytes(self, tenant: str) -> int:
        account = self._accounts.get(tenant, TenantCredits())
        return len(account.pages) * self._layout.page_bytes + account.own_bytes

    def total_bytes(self) -> int:
        return sum(map(self.paid_bytes, self._accounts))

    def check(self) -> None:
        """Prove that each tenant pays exactly what its credits keep."""
        for tenant, account in self._accounts.items():
            assert account.credits, "an account without credits stays"
            paths: set[Entry] = set()
            for entry in account.credits:
                node: Entry | None = entry
                while node is not None:
                    paths.add(node)
                    node = node.parent
            assert paths == set(account.pages)
            assert account.own_bytes == sum(credit.own_bytes for credit in account.credits.values())
            named = {(name, entry) for name, entries in account.named.items() for entry in entries}
            asked = {(name, entry) for entry, credit in account.credits.items() for name in credit.names}
            assert named == {pair for pair in asked if pair[0]}
            assert all(tenant in self._payers[entry] for entry in account.credits)
        for entry, tenants in self._payers.items():
            assert entry.retained_until_s == max(
                self._accounts[tenant].credits[entry].until_s for tenant in tenants
            )

    def _credit(self, tenant: str, entry: Entry) -> Credit | None:
        account = self._accounts.get(tenant)
        return None if account is None else account.credits.get(entry)

    def _open(self, tenant: str, account: TenantCredits, entry: Entry) -> Credit:
        own_bytes = 0 if entry.checkpoint is None else entry.checkpoint.num_bytes(self._layout)
        account.own_bytes += own_bytes
        node: Entry | None = entry
        while node is not None:
            account.pages[node] = account.pages.get(node, 0) + 1
            node = node.parent if account.pages[node] == 1 else None
        self._payers.setdefault(entry, set()).add(tenant)
        return Credit(0.0, own_bytes)

    def _drop(self, tenant: str, entry: Entry) -> None:
        account = self._accounts[tenant]
        credit = account.credits.pop(entry)
        account.own_bytes -= credit.own_bytes
        node: Entry | None = entry
        while node is not None:
            account.pages[node] -= 1
            if account.pages[node]:
                break
            del account.pages[node]
            node = node.parent
        for name in credit.names - {""}:
            account.named[name].discard(entry)
            if not account.named[name]:
                del account.named[name]
        self._payers[entry].discard(tenant)
        if not self._payers[entry]:
            del self._payers[entry]
        self._refresh(entry)
        self._index.add_candidate(entry)
        if not account.credits:
            del self._accounts[tenant]

    def _unname(self, tenant: str, name: str, kept: AbstractSet[Entry]) -> None:
        """Take `name` off all entries but those `kept`; drop the credits that no other name asked for."""
        account = self._accounts.get(tenant, TenantCredits())
        gone = account.named.get(name, set[Entry]()) - kept
        for entry in sorted(gone, key=lambda entry: -entry.depth_pages):
            if account.credits[entry].names == {name}:
                self._drop(tenant, entry)
            else:
                account.credits[entry].names.discard(name)
                account.named[name].discard(entry)

    def _watch(self, tenant: str, entry: Entry, credit: Credit) -> None:
        """Note the end of a credit. An earlier note of it is enough: `advance` looks again."""
        self._serial += 1
        heapq.heappush(self._ends, (credit.until_s, self._serial, tenant, entry, credit))
        if len(self._ends) > 2 * sum(len(account.credits) for account in self._accounts.values()) + NOTES_MAX:
            self._ends = [note for note in self._ends if self._credit(note[2], note[3]) is note[4]]
            heapq.heapify(self._ends)

    def _refresh(self, entry: Entry) -> None:
        """Give an entry the end and the length of its longest credit."""
        found = (self._accounts[tenant].credits[entry] for tenant in self._payers.get(entry, ()))
        longest = max(found, key=lambda credit: credit.until_s, default=None)
        entry.retained_until_s = 0.0 if longest is None else longest.until_s
        entry.retained_s = 0.0 if longest is None else longest.retain_s
