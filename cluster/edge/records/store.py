"""The records of an edge: transactions for one tenant, and the removal of what has expired."""

from collections.abc import Callable
from typing import TypeVar

from tidemill.cluster.edge.records.database import Database, Transaction
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import RequestError

T = TypeVar("T")
Kind = TypeVar("Kind")

NEVER_S = 1 << 62
"""A time after all others."""

LOOK_S = 60.0
"""The period in which expired records are removed."""

EXPIRE = {
    """DELETE FROM tidemill_conversations WHERE id IN
        (SELECT id FROM tidemill_conversations WHERE expires_s <= ? LIMIT ?)""": 100,
    """DELETE FROM tidemill_batches WHERE id IN
        (SELECT id FROM tidemill_batches WHERE expires_s <= ? LIMIT ?)""": 1,
    "DELETE FROM tidemill_files WHERE id IN (SELECT id FROM tidemill_files WHERE expires_s <= ? LIMIT ?)": 1,
}
"""The statements that remove what has expired, and the records of each transaction: a batch has 50,000 lines,
a file 200 MiB."""

Of = Callable[[Transaction, str, float, float], Kind]
"""The records of one kind, like TenantFiles, of a tenant in a transaction, with the time and that until
expiry."""


class Records:
    """The records of all tenants. Every method raises Unserved when the database is gone."""

    def __init__(self, database: Database, ttl_s: float, unix_time_s: Callable[[], float]) -> None:
        """Records expire `ttl_s` seconds after they were made, conversations after they have last grown."""
        self._database = database
        self._ttl_s = ttl_s
        self._unix_time_s = unix_time_s

    async def read(self, tenant: str, of: Of[Kind], work: Callable[[Kind], T]) -> T:
        """Return what `work` finds. Raises what it raises."""
        now_s = self._unix_time_s()
        return await self._database.read(lambda sent: work(of(sent, tenant, now_s, self._ttl_s)))

    async def write(self, tenant: str, of: Of[Kind], work: Callable[[Kind], T]) -> T:
        """Return the result of `work` when its changes are on disk. Raises what it raises; then nothing has
        changed."""
        now_s = self._unix_time_s()
        return await self._database.write(lambda sent: work(of(sent, tenant, now_s, self._ttl_s)))

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
        now_s = int(self._unix_time_s())
        for sql, count in EXPIRE.items():
            while await self._database.write(lambda sent, sql=sql, count=count: sent.run(sql, now_s, count)):
                pass


def missing(kind: str, name: str, param: str | None = None, status: int = 404) -> RequestError:
    """Return the error for an id that the tenant does not have."""
    message = f"{kind.replace('_', ' ')} with id {name[:64]!r} not found: never stored, deleted, or expired"
    return RequestError(message, param=param, status=status, code=f"{kind}_not_found")
