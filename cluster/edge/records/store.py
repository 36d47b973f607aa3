"""The records of an edge: transactions for one tenant, and the removal of what has expired."""

from collections.abc import Callable
from typing import TypeVar

from tidemill.cluster.edge.records.account import (
    BATCHES,
    CONVERSATIONS,
    FILES,
    Account,
    TenantLimits,
    drop,
)
from tidemill.cluster.edge.records.database import Database, Transaction
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import RequestError

T = TypeVar("T")
Kind = TypeVar("Kind")

NEVER_S = 1 << 62
"""A time after all others."""

LOOK_S = 60.0
"""The period in which expired records are removed."""

GRACE_S = 3600.0
"""The time after which what has expired is removed: what was read before may be in use, like the conversation
of an answer in progress."""

EXPIRE = {
    CONVERSATIONS: ("expires_s <= ?", 100),
    BATCHES: ("is_open = 0 AND expires_s <= ?", 1),
    FILES: ("expires_s <= ?", 1),
}
"""The records that are removed, and the most in each transaction: a batch has 50,000 lines, a file
200 MiB."""

Of = Callable[[Account], Kind]
"""The records of one kind, like TenantFiles, of a tenant in a transaction."""


class Records:
    """The records of all tenants. Every method raises Unserved when the database is gone."""

    def __init__(
        self,
        database: Database,
        ttl_s: float,
        unix_time_s: Callable[[], float],
        limits_of: Callable[[str], TenantLimits] = lambda _: TenantLimits(),
    ) -> None:
        """Records expire `ttl_s` seconds after they were made, conversations after they have last grown,
        batches after they have ended. `limits_of` has those of a tenant."""
        self._database = database
        self._ttl_s = ttl_s
        self._unix_time_s = unix_time_s
        self._limits_of = limits_of

    async def read(self, tenant: str, of: Of[Kind], work: Callable[[Kind], T]) -> T:
        """Return what `work` finds. Raises what it raises."""
        return await self._database.read(lambda sent: work(of(self._account(sent, tenant))))

    async def write(self, tenant: str, of: Of[Kind], work: Callable[[Kind], T]) -> T:
        """Return the result of `work` when its changes are on disk. Raises what it raises; then nothing has
        changed."""
        return await self._database.write(lambda sent: work(of(self._account(sent, tenant))))

    def _account(self, sent: Transaction, tenant: str) -> Account:
        now_s = self._unix_time_s()
        return Account(sent, tenant, int(now_s), int(now_s + self._ttl_s), self._limits_of(tenant))

    async def run(self) -> None:
        """Remove what has expired until cancelled."""
        try:
            await every(LOOK_S, self.expire, "stored records")
        finally:
            self.close()

    def close(self) -> None:
        self._database.close()

    async def expire(self) -> None:
        """Remove what has expired, in short transactions."""
        before_s = int(self._unix_time_s() - GRACE_S)
        for table, (condition, count) in EXPIRE.items():
            where = f"id IN (SELECT id FROM {table} WHERE {condition} LIMIT ?)"  # noqa: S608 - one of ours

            def remove(sent: Transaction, table: str = table, where: str = where, most: int = count) -> int:
                return drop(sent, table, where, before_s, most)

            while await self._database.write(remove):
                pass


def missing(kind: str, name: str, param: str | None = None, status: int = 404) -> RequestError:
    """Return the error for an id that the tenant does not have."""
    message = f"{kind.replace('_', ' ')} with id {name[:64]!r} not found: never stored, deleted, or expired"
    return RequestError(message, param=param, status=status, code=f"{kind}_not_found")
