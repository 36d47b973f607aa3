"""Files: uploads, in parts, and the results of batches, which are the lines in its journal."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.cluster.edge.records.account import BATCHES, FILES, ROW_BYTES, Account, TenantRecords, drop
from tidemill.cluster.edge.records.store import NEVER_S, missing
from tidemill.workers.messages import RequestError

UPLOAD_S_MAX = 3600.0
"""The time after which an upload without an end is removed."""

TENANT_FILES_MAX = 10_000
"""The most files of one tenant."""

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


LINE_BYTES = (
    f"{ROW_BYTES} + LENGTH(custom_id) + LENGTH(sort_key) + LENGTH(body) + COALESCE(LENGTH(result), 0)"
)
"""The bytes that a line counts; characters of a body without a result."""


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


class TenantFiles(TenantRecords):
    """The files of one tenant. What others have is missing here: RequestError (404)."""

    def check_count(self) -> None:
        """Raise RequestError if there are too many files."""
        sql = "SELECT COUNT(*) FROM tidemill_files WHERE tenant = ?"
        ((count,),) = self._sent.rows(sql, self._tenant)
        if count >= TENANT_FILES_MAX:
            raise RequestError(
                f"you have {count:,} files, with uploads in progress, of at most {TENANT_FILES_MAX:,}: "
                "delete some",
                status=413,
                param="file",
            )

    def begin(self, name: str, upload_bytes: int) -> None:
        """Begin an upload of some bytes, which is hidden before `finish`. Raises RequestError if there is no
        room."""
        self.check_count()
        self.account.check_room(upload_bytes)
        self.insert(StoredFile(name, "", "", self._now_s, int(self._now_s + UPLOAD_S_MAX)))
        self.account.count(FILES, name, ROW_BYTES)

    def insert(self, file: StoredFile) -> None:
        """Store a file that counts no bytes yet."""
        self._sent.run(
            "INSERT INTO tidemill_files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            *(file.id, self._tenant, file.name, file.purpose, file.created_s, file.expires_s),
            *(file.num_bytes, file.batch, file.is_error),
        )

    def add_part(self, name: str, number: int, body: bytes) -> None:
        """Add a part to an upload, which has some more time for the next one. Raises RequestError."""
        if not self._keep(name, int(self._now_s + UPLOAD_S_MAX)):
            raise missing("file", name)
        self._sent.run("INSERT INTO tidemill_parts VALUES (?, ?, ?)", name, number, body)
        self.account.count(FILES, name, ROW_BYTES + len(body))

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

    def input_of_batch(self, name: str, until_s: int) -> None:
        """Keep a file until a batch of it has run or expired. Raises RequestError if it is not for one."""
        if self.file(name, "input_file_id").purpose != "batch":
            raise RequestError("the purpose of this file is not batch", param="input_file_id")
        self._keep(name, until_s)

    def _keep(self, name: str, until_s: int) -> int:
        """Let a file expire at a time or, if that is later, as before; return whether it is there."""
        later = "CASE WHEN expires_s < ? THEN ? ELSE expires_s END"
        sql = f"UPDATE tidemill_files SET expires_s = {later} WHERE id = ?"  # noqa: S608 - ours
        return self._sent.run(sql, until_s, until_s, name)

    def delete(self, name: str) -> None:
        """Remove a file; a result of a batch with its lines."""
        file = self.file(name)
        if file.batch is None:
            self.drop(name)
            return
        self._sent.run("DELETE FROM tidemill_files WHERE id = ?", name)
        self._sent.run(
            "DELETE FROM tidemill_lines WHERE batch = ? AND is_error = ?", file.batch, file.is_error
        )
        count_lines(self.account, file.batch)

    def drop(self, name: str) -> None:
        """Remove a file, or what an upload has left."""
        drop(self._sent, FILES, "id = ?", name)

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


def count_lines(account: Account, batch: str) -> None:
    """Count a batch again, some of whose lines were removed or ended."""
    locked = "UPDATE tidemill_batches SET owner = owner WHERE id = ? RETURNING stored_bytes"
    for (counted,) in account.sent.rows(locked, batch):
        lines = f"SELECT COALESCE(SUM({LINE_BYTES}), 0) FROM tidemill_lines WHERE batch = ?"  # noqa: S608 - ours
        ((line_bytes,),) = account.sent.rows(lines, batch)
        account.count(BATCHES, batch, ROW_BYTES + int(line_bytes) - counted, is_checked=False)
