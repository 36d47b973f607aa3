"""The account of a tenant: its limits, and the bytes that it stores, counted in each transaction.

A conversation, a file or a batch counts all that it holds, so that its removal gives it back. The account
is the last row that a transaction locks; otherwise two could wait for each other.
"""

from collections import Counter
from dataclasses import dataclass

from tidemill.cluster.edge.records.database import Transaction
from tidemill.workers.messages import RequestError

ROW_BYTES = 512
"""The bytes that each row counts beside its texts: ids, and entries of indices."""

CONVERSATIONS, FILES, BATCHES = "tidemill_conversations", "tidemill_files", "tidemill_batches"

COUNT = (
    "INSERT INTO tidemill_accounts VALUES (?, ?) ON CONFLICT (name)"
    " DO UPDATE SET stored_bytes = tidemill_accounts.stored_bytes + excluded.stored_bytes"
    " RETURNING stored_bytes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """The most bytes that a tenant stores, and the most lines of its batches that have not ended."""

    stored_bytes: int = 8 << 30
    queued_batch_requests: int = 200_000


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant in a transaction. Records that are made in it expire at `expires_s`."""

    sent: Transaction
    tenant: str
    now_s: int
    expires_s: int
    limits: TenantLimits

    def check_room(self, num_bytes: int = 0) -> None:
        """Raise RequestError if there is no room for more bytes."""
        sql = "SELECT stored_bytes FROM tidemill_accounts WHERE name = ?"
        rows = self.sent.rows(sql, _payer(self.tenant))
        self._check((rows[0][0] if rows else 0) + num_bytes)

    def count(self, table: str, record: str, num_bytes: int, *, is_checked: bool = True) -> None:
        """Count bytes that a record got or, below 0, lost, unless it is gone. Raises RequestError if that is
        too much."""
        sql = f"UPDATE {table} SET stored_bytes = stored_bytes + ? WHERE id = ?"  # noqa: S608 - one of ours
        if not self.sent.run(sql, num_bytes, record):
            return
        ((stored_bytes,),) = self.sent.rows(COUNT, _payer(self.tenant), num_bytes)
        if is_checked and num_bytes > 0:
            self._check(stored_bytes)

    def _check(self, stored_bytes: int) -> None:
        most = self.limits.stored_bytes
        if stored_bytes > most:
            raise RequestError(
                f"you would store {stored_bytes:,} bytes of at most {most:,}: delete responses, "
                "conversations or files, or ask the operator for a larger max_stored_bytes",
                status=413,
                code="storage_quota_exceeded",
            )


class TenantRecords:
    """The records of one kind of a tenant, in a transaction."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._sent = account.sent
        self._tenant = account.tenant
        self._now_s = account.now_s
        self._expires_s = account.expires_s


def drop(sent: Transaction, table: str, where: str, *values: object) -> int:
    """Remove records of any tenants with all that they hold, and return their number."""
    sql = f"DELETE FROM {table} WHERE {where} RETURNING tenant, stored_bytes"  # noqa: S608 - one of ours
    rows = sent.rows(sql, *values)
    freed = Counter[str]()
    for tenant, stored_bytes in rows:
        freed[_payer(tenant)] += stored_bytes
    for name, stored_bytes in sorted(freed.items()):
        sent.rows(COUNT, name, -stored_bytes)
    return len(rows)


def size(*texts: str) -> int:
    """Return the bytes that a row with these texts counts."""
    return ROW_BYTES + sum(len(text.encode()) for text in texts)


def _payer(tenant: str) -> str:
    """Return the name of a tenant's account. Clients without a known key, who can call themselves anything,
    have one together."""
    return tenant if tenant.startswith("tenant:") else ""
