"""Batches: the journal of their lines, and the lease by which one edge alone runs one.

An edge that ends leaves its lease to run out, and another one goes on with the lines without a result.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tidemill.cluster.edge.records.account import BATCHES, ROW_BYTES, Account, TenantRecords
from tidemill.cluster.edge.records.files import StoredFile, TenantFiles, count_lines
from tidemill.cluster.edge.records.store import NEVER_S, missing
from tidemill.workers.messages import RequestError

Json = dict[str, Any]

LEASE_S = 15
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
OPEN_MAX = 100
"""The most batches of a tenant that have not ended."""

VISIBLE = "tenant = ? AND (is_open = 1 OR expires_s > ?)"
"""The condition for batches of a tenant that have not expired: an open one does not."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch; `body` is the object of the API. `key_digest` is that of the key that made it."""

    id: str
    tenant: str
    key_digest: str
    body: Json


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line of a batch. `custom_id` and `body` are JSON; lines with equal beginnings have sort keys with
    equal beginnings."""

    number: int
    custom_id: str
    sort_key: bytes
    body: str


class LeaseLost(Exception):
    """Another edge runs the batch."""


class TenantBatches(TenantRecords):
    """The batches of one tenant; those of all for the edge that runs them."""

    def __init__(self, account: Account) -> None:
        super().__init__(account)
        self.files = TenantFiles(account)

    def create(self, batch: StoredBatch) -> None:
        """Store a batch. Raises RequestError if there is no room for it and its results, or too many are
        open."""
        self.files.check_count()
        if len(self._queued()) >= OPEN_MAX:
            raise _too_many(f"{OPEN_MAX} batches")
        self._sent.run(
            "INSERT INTO tidemill_batches VALUES (?, ?, ?, ?, ?, 1, '', 0, ?, 0)",
            *(batch.id, self._tenant, batch.key_digest, self._now_s, self._expires_s, json.dumps(batch.body)),
        )
        self.account.count(BATCHES, batch.id, ROW_BYTES)

    def _queued(self) -> list[int]:
        """Return the numbers of lines of the open batches, as far as they are known."""
        sql = "SELECT body FROM tidemill_batches WHERE is_open = 1 AND tenant = ?"
        rows = self._sent.rows(sql, self._tenant)
        return [json.loads(body)["request_counts"]["total"] for (body,) in rows]

    def batch(self, name: str) -> Json:
        """Return a batch with its counts. Raises RequestError."""
        sql = f"SELECT body FROM tidemill_batches WHERE id = ? AND {VISIBLE}"  # noqa: S608 - ours
        rows = self._sent.rows(sql, name, self._tenant, self._now_s)
        if not rows:
            raise missing("batch", name)
        return self._counted(name, json.loads(rows[0][0]))

    def listed(self, after: str | None, limit: int) -> list[Json]:
        """Return at most `limit` batches, the newest first, behind the one with the id `after`."""
        start = (NEVER_S, "")
        if after is not None:
            self.batch(after)
            (start,) = self._sent.rows("SELECT created_s, id FROM tidemill_batches WHERE id = ?", after)
        rows = self._sent.rows(
            f"SELECT id, body FROM tidemill_batches WHERE {VISIBLE}"  # noqa: S608 - ours
            " AND (created_s, id) < (?, ?) ORDER BY created_s DESC, id DESC LIMIT ?",
            *(self._tenant, self._now_s, *start, limit),
        )
        return [self._counted(name, json.loads(body)) for name, body in rows]

    def cancel(self, name: str) -> Json:
        """Ask for the end of a batch and return it."""
        self.batch(name)
        sql = "UPDATE tidemill_batches SET is_open = 1 WHERE id = ? AND is_open = 1 RETURNING body"
        for (body,) in self._sent.rows(sql, name):  # locked: its edge cannot end it meanwhile
            self._set(name, json.loads(body), status="cancelling", cancelling_at=self._now_s)
        return self.batch(name)

    # ---- For the edge that runs a batch. Each change renews the lease first, which locks the batch: an edge
    # that stood still has lost it, and `cancel` and `end` see all of a change or nothing. ----

    def waits(self) -> bool:
        """Return whether some batch is run by no edge."""
        sql = "SELECT 1 FROM tidemill_batches WHERE is_open = 1 AND leased_until_s <= ? LIMIT 1"
        return bool(self._sent.rows(sql, self._now_s))

    def claim(self, owner: str) -> StoredBatch | None:
        """Lease the oldest batch that no edge runs, of the tenant that has waited longest since one of its
        batches ran; None: there is none."""
        rows = self._sent.rows(
            "UPDATE tidemill_batches SET owner = ?, leased_until_s = ? WHERE id = (SELECT id FROM"
            " tidemill_batches b WHERE is_open = 1 AND leased_until_s <= ? ORDER BY (SELECT"
            " MAX(leased_until_s) FROM tidemill_batches WHERE tenant = b.tenant), created_s, id LIMIT 1)"
            " AND leased_until_s <= ? RETURNING id, tenant, key_digest, body",
            *(owner, self._now_s + LEASE_S, self._now_s, self._now_s),
        )
        if not rows:
            return None
        name, tenant, key_digest, body = rows[0]
        return StoredBatch(name, tenant, key_digest, json.loads(body))

    def num_running(self) -> int:
        """Return the number of batches of all tenants that edges run."""
        sql = "SELECT COUNT(*) FROM tidemill_batches WHERE is_open = 1 AND leased_until_s > ?"
        return int(self._sent.rows(sql, self._now_s)[0][0])

    def others_wait(self) -> bool:
        """Return whether a batch waits of another tenant, of which no batch runs."""
        sql = (
            "SELECT 1 FROM tidemill_batches b WHERE is_open = 1 AND leased_until_s <= ? AND tenant <> ?"
            " AND NOT EXISTS (SELECT 1 FROM tidemill_batches WHERE tenant = b.tenant AND leased_until_s > ?)"
            " LIMIT 1"
        )
        return bool(self._sent.rows(sql, self._now_s, self._tenant, self._now_s))

    def release(self, name: str, owner: str) -> None:
        """Let an edge run the batch when its tenant is the next. Raises LeaseLost."""
        self.renew(name, owner)
        sql = "UPDATE tidemill_batches SET owner = '', leased_until_s = ? WHERE id = ?"
        self._sent.run(sql, self._now_s, name)

    def renew(self, name: str, owner: str) -> Json:
        """Extend the lease and return the batch. Raises LeaseLost."""
        rows = self._sent.rows(
            "UPDATE tidemill_batches SET leased_until_s = ? WHERE id = ? AND owner = ? AND is_open = 1"
            " RETURNING body",
            *(self._now_s + LEASE_S, name, owner),
        )
        if not rows:
            raise LeaseLost(name)
        return cast("Json", json.loads(rows[0][0]))

    def add_lines(self, name: str, owner: str, lines: Sequence[StoredLine]) -> None:
        """Add lines of a batch that is validated. Raises LeaseLost, and RequestError if there is no room."""
        self.renew(name, owner)
        rows = [(name, line.number, line.custom_id, line.sort_key, line.body) for line in lines]
        self._sent.run_each("INSERT INTO tidemill_lines VALUES (?, ?, ?, ?, ?, NULL, NULL)", rows)
        texts = sum(len(line.custom_id) + len(line.sort_key) + len(line.body) for line in lines)
        self.account.count(BATCHES, name, ROW_BYTES * len(lines) + texts)

    def clear(self, name: str, owner: str) -> None:
        """Remove the lines of a batch, of which an edge that has ended may have validated some. Raises
        LeaseLost."""
        self.renew(name, owner)
        self._sent.run("DELETE FROM tidemill_lines WHERE batch = ?", name)
        count_lines(self.account, name)

    def begin(self, name: str, owner: str, total: int) -> None:
        """Note that the lines of a batch are valid; one that was cancelled meanwhile stays so. Raises
        LeaseLost, and RequestError if the tenant has too many lines."""
        body = self.renew(name, owner)
        most = self.account.limits.queued_batch_requests
        if sum(self._queued()) + total > most:
            raise _too_many(f"{most:,} lines")
        status = "in_progress" if body["status"] == "validating" else body["status"]
        counts = {"total": total}
        self._set(name, body, status=status, in_progress_at=self._now_s, request_counts=counts)

    def left(self, name: str) -> list[int]:
        """Return the numbers of the lines without a result; neighbours have long prefixes in common."""
        sql = (
            "SELECT number FROM tidemill_lines WHERE batch = ? AND is_error IS NULL ORDER BY sort_key, number"
        )
        return [number for (number,) in self._sent.rows(sql, name)]

    def line(self, name: str, number: int) -> tuple[str, str]:
        """Return `custom_id` and `body` of a line."""
        sql = "SELECT custom_id, body FROM tidemill_lines WHERE batch = ? AND number = ?"
        return self._sent.rows(sql, name, number)[0]

    def journal(self, name: str, owner: str, number: int, result: bytes, *, is_error: bool) -> None:
        """Keep the result of a line, in place of its body. Raises LeaseLost."""
        self.renew(name, owner)
        sql = (
            "SELECT LENGTH(sort_key) + LENGTH(body) FROM tidemill_lines"
            " WHERE batch = ? AND number = ? AND is_error IS NULL"
        )
        freed = self._sent.rows(sql, name, number)
        if not freed:
            raise LeaseLost(name)
        self._sent.run(
            "UPDATE tidemill_lines SET result = ?, is_error = ?, body = '', sort_key = ?"
            " WHERE batch = ? AND number = ?",
            *(result, int(is_error), b"", name, number),
        )
        self.account.count(BATCHES, name, len(result) - freed[0][0], is_checked=False)

    def fail(self, name: str, owner: str, errors: Sequence[Json]) -> None:
        """End a batch with lines that cannot be read. Raises LeaseLost."""
        self.clear(name, owner)
        listed = {"object": "list", "data": list(errors)}
        self._set(name, self.renew(name, owner), status="failed", failed_at=self._now_s, errors=listed)

    def end(self, name: str, owner: str, status: str) -> None:
        """End a batch: its results become files. Raises LeaseLost."""
        body = self.renew(name, owner)
        if status == "expired":
            sql = "SELECT number, custom_id FROM tidemill_lines WHERE batch = ? AND is_error IS NULL"
            self._sent.run_each(
                "UPDATE tidemill_lines SET result = ?, is_error = 1, body = '', sort_key = ''"
                " WHERE batch = ? AND number = ?",
                [(_expired(name, *row), name, row[0]) for row in self._sent.rows(sql, name)],
            )
        self._sent.run("DELETE FROM tidemill_lines WHERE batch = ? AND is_error IS NULL", name)
        ids: dict[str, str] = {}
        for is_error, field in enumerate(("output_file_id", "error_file_id")):
            sql = "SELECT COUNT(*), COALESCE(SUM(LENGTH(result) + 1), 0) FROM tidemill_lines"
            count, num_bytes = self._sent.rows(sql + " WHERE batch = ? AND is_error = ?", name, is_error)[0]
            if count:
                ids[field] = f"file-{name}-{field.partition('_')[0]}"
                self.files.insert(
                    StoredFile(
                        ids[field],
                        f"{name}_{field.partition('_')[0]}.jsonl",
                        "batch_output",
                        self._now_s,
                        self._expires_s,
                        num_bytes,
                        name,
                        is_error,
                    )
                )
        count_lines(self.account, name)
        counts = self._counted(name, body)["request_counts"]
        done = {"status": status, f"{status}_at": self._now_s, "finalizing_at": self._now_s}
        self._set(name, body, **done, **ids, request_counts=counts)

    def _set(self, name: str, body: Json, **fields: object) -> None:
        """Change fields of a batch, which is locked since its `body` was read. It expires some time after its
        last change."""
        body = body | fields
        is_open = int(body["status"] in OPEN)
        self._sent.run(
            "UPDATE tidemill_batches SET body = ?, is_open = ?, expires_s = ?,"
            " leased_until_s = CASE WHEN ? = 1 THEN leased_until_s ELSE ? END WHERE id = ?",
            *(json.dumps(body), is_open, self._expires_s, is_open, self._now_s, name),
        )

    def _counted(self, name: str, body: Json) -> Json:
        """Return the batch with its counts up to now, if it has not ended."""
        if body["status"] not in OPEN:
            return body
        rows = self._sent.rows(
            "SELECT is_error, COUNT(*) FROM tidemill_lines WHERE batch = ? AND is_error IS NOT NULL"
            " GROUP BY is_error",
            name,
        )
        found = dict(rows)
        counts = {"completed": found.get(0, 0), "failed": found.get(1, 0)}
        return {**body, "request_counts": {"total": 0, **body["request_counts"], **counts}}


def result_of(batch: str, number: int, custom_id: str, response: str, error: str = "null") -> bytes:
    """Return a line of a result; `custom_id`, `response` and `error` are JSON."""
    return (
        f'{{"id":"{batch}_{number}","custom_id":{custom_id},"response":{response},"error":{error}}}'
    ).encode(errors="backslashreplace")


def _too_many(most: str) -> RequestError:
    message = f"you have at most {most} of batches that have not ended: wait for some, or cancel them"
    return RequestError(message, status=429, code="batch_queue_full")


def _expired(batch: str, number: int, custom_id: str) -> bytes:
    error = {"code": "batch_expired", "message": "the batch expired before this line was answered"}
    return result_of(batch, number, custom_id, "null", json.dumps(error))
