"""Files: uploads, in parts, and the results of batches, which are the lines in its journal."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.cluster.edge.records.database import Transaction
from tidemill.cluster.edge.records.store import NEVER_S, missing
from tidemill.workers.messages import RequestError

UPLOAD_S_MAX = 3600.0
"""The time after which an upload without an end is removed."""

TENANT_BYTES_MAX = 8 << 30
TENANT_FILES_MAX = 10_000
"""The most that the files of one tenant hold, and the most files."""

LINES_TOGETHER = 16

COLUMNS = "SELECT id, name, purpose, created_s, expires_s, num_bytes, batch, is_error FROM tidemill_files"
_LISTED = COLUMNS + (
    " WHERE tenant = ? AND expires_s > ? AND num_bytes IS NOT NULL AND purpose = COALESCE(?, purpose)"
)
PAGE_OF = {
    True: _LISTED + " AND (created_s, id) > (?, ?) ORDER BY created_s, id LIMIT ?",
    False: _LISTED + " AND (created_s, id) < (?, ?) ORDER BY created_s DESC, id DESC LIMIT ?",
}
"""The statement for a page of files, by whether the oldest is first."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file; with a `batch` it holds its results, or its errors."""

    id: str
    name: str
    purpose: str
    created_s: int
    expires_s: int
    num_bytes: int | None = None  # None: it is being uploaded
    batch: str | None = None
    is_error: int | None = None


class TenantFiles:
    """The files of one tenant. What others have is missing here: RequestError (404)."""

    def __init__(self, sent: Transaction, tenant: str, now_s: float, ttl_s: float) -> None:
        self._sent = sent
        self._tenant = tenant
        self._now_s = int(now_s)
        self.expires_s = int(now_s + ttl_s)

    def check_room(self, upload_bytes: int = 0) -> None:
        """Raise RequestError if there is no room; each upload in progress may become `upload_bytes`."""
        sql = "SELECT COUNT(*), COALESCE(SUM(COALESCE(num_bytes, ?)), 0) FROM tidemill_files WHERE tenant = ?"
        ((count, num_bytes),) = self._sent.rows(sql, upload_bytes, self._tenant)
        if count >= TENANT_FILES_MAX or num_bytes >= TENANT_BYTES_MAX:
            raise RequestError(
                f"you have {count:,} files of {int(num_bytes) >> 20:,} MiB, with uploads in progress, of at "
                f"most {TENANT_FILES_MAX:,} files and {TENANT_BYTES_MAX >> 20:,} MiB: delete some",
                status=413,
                param="file",
            )

    def begin(self, name: str, upload_bytes: int) -> None:
        """Begin an upload, which is hidden before `finish`. Raises RequestError if there is no room."""
        self.check_room(upload_bytes)
        until_s = int(self._now_s + UPLOAD_S_MAX)
        self.insert(StoredFile(name, "", "", self._now_s, until_s))

    def insert(self, file: StoredFile) -> None:
        self._sent.run(
            "INSERT INTO tidemill_files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(file.id, self._tenant, file.name, file.purpose, file.created_s, file.expires_s),
            *(file.num_bytes, file.batch, file.is_error),
        )

    def add_part(self, name: str, number: int, body: bytes) -> None:
        self._sent.run("INSERT INTO tidemill_parts VALUES (?, ?, ?)", name, number, body)

    def finish(self, file: StoredFile) -> None:
        """End an upload: from now on the file is there."""
        self._sent.run(
            "UPDATE tidemill_files SET name = ?, purpose = ?, created_s = ?, expires_s = ?, num_bytes = ?"
            " WHERE id = ?",
            *(file.name, file.purpose, file.created_s, file.expires_s, file.num_bytes, file.id),
        )

    def file(self, name: str, param: str | None = None) -> StoredFile:
        """Return a file. Raises RequestError, which names `param`."""
        sql = COLUMNS + " WHERE id = ? AND tenant = ? AND expires_s > ? AND num_bytes IS NOT NULL"
        rows = self._sent.rows(sql, name, self._tenant, self._now_s)
        if not rows:
            raise missing("file", name, param, status=404 if param is None else 400)
        return StoredFile(*rows[0])

    def listed(
        self, purpose: str | None, after: str | None, limit: int, *, ascending: bool
    ) -> Sequence[StoredFile]:
        """Return at most `limit` files, those behind the one with the id `after`. Raises RequestError."""
        start = (-1 if ascending else NEVER_S, "")
        if after is not None:
            start = (self.file(after).created_s, after)
        of = (self._tenant, self._now_s, purpose)
        return [StoredFile(*row) for row in self._sent.rows(PAGE_OF[ascending], *of, *start, limit)]

    def delete(self, name: str) -> None:
        """Remove a file; a result of a batch with its lines."""
        file = self.file(name)
        self.drop(name)
        sql = "DELETE FROM tidemill_lines WHERE batch = ? AND is_error = ?"
        self._sent.run(sql, file.batch, file.is_error)

    def drop(self, name: str) -> None:
        """Remove a file, or what an upload has left."""
        self._sent.run("DELETE FROM tidemill_files WHERE id = ?", name)

    def chunk(self, file: StoredFile, after: int) -> tuple[int, bytes] | None:
        """Return the number of the next piece of the content behind the one of a number, first -1, and the
        piece; None at the end."""
        if file.batch is None:
            sql = "SELECT number, body FROM tidemill_parts WHERE file = ? AND number = ?"
            rows = self._sent.rows(sql, file.id, after + 1)
            return (rows[0][0], bytes(rows[0][1])) if rows else None
        rows = self._sent.rows(
            "SELECT number, result FROM tidemill_lines WHERE batch = ? AND is_error = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            *(file.batch, file.is_error, after, LINES_TOGETHER),
        )
        return (rows[-1][0], b"".join(b"%b\n" % bytes(result) for _, result in rows)) if rows else None
