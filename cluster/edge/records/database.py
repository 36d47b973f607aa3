"""The database of an edge: SQLite in a file, for the edges of one machine, or a Postgres for all edges.

One SQL text is for both: it writes parameters as `?`, and types as TEXT, BIGINT and BYTEA. Calls run on
threads of their own, so that the event loop never waits for a disk or a network.
"""

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tidemill.cluster.edge.records.tables import TABLES
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved

T = TypeVar("T")

THREADS = 4
LOCK_S_MAX = 5
"""The time that a connection, a lock or a statement may take."""

ANSWER_S_MAX = 15.0
"""The time that a client waits for the database, with the wait for a thread."""

POSTGRES = ("postgresql://", "postgres://")
SQLITE = "sqlite:///"
FILE_MODE = 0o600

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """A checked address, and the time for which responses are stored."""

    url: str
    path: Path | None  # of an SQLite file; None: Postgres
    ttl_s: float

    def __str__(self) -> str:
        return "Postgres" if self.path is None else str(self.path)


def database_settings(url: str, ttl_s: float) -> DatabaseSettings:
    """Return the settings of a database: a path, sqlite:///path, postgresql://... Raises TidemillError."""
    if url.startswith(POSTGRES):
        try:
            import_module("psycopg")
        except ImportError as error:
            raise TidemillError(
                f"--database: Postgres needs an extra ({error}): pip install 'tidemill[postgres]'"
            ) from error
        return DatabaseSettings(url, None, ttl_s)
    if "://" in url and not url.startswith(SQLITE):
        scheme = url.partition("://")[0]
        raise TidemillError(
            f"--database: there is no {scheme[:32]!r}: give a path, sqlite:///path or postgresql://HOST/NAME"
        )
    path = Path(url.removeprefix(SQLITE)).absolute()
    if not path.parent.is_dir() or path.is_dir():
        raise TidemillError(f"--database: {path} is no file in a folder that exists: make {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TidemillError(f"--database: {path} cannot be written: let this user write it and its folder")
    return DatabaseSettings(url, path, ttl_s)


class Transaction:
    """The statements of one transaction."""

    def __init__(self, cursor: Any, mark: str) -> None:  # noqa: ANN401 - of either library
        self._cursor = cursor
        self._mark = mark

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that returns some."""
        self._cursor.execute(sql.replace("?", self._mark), values)
        return list(self._cursor.fetchall())

    def run(self, sql: str, *values: object) -> int:
        """Return the number of rows that a statement changed."""
        self._cursor.execute(sql.replace("?", self._mark), values)
        return int(self._cursor.rowcount)

    def run_each(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        self._cursor.executemany(sql.replace("?", self._mark), list(rows))


class Database:
    """Connections to one database, a few at most, each on a thread of its own."""

    def __init__(self, settings: DatabaseSettings) -> None:
        """Connect at first use, and again after an error."""
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, "database")
        self._idle: list[Any] = []  # connections
        self._is_closed = False
        self._making_tables = threading.Lock()
        self._has_tables = False
        self._is_down = False
        if settings.path is None:
            self._library: Any = import_module("psycopg")
            self._mark, self._begin = "%s", "BEGIN"
        else:
            self._library = sqlite3
            self._mark, self._begin = "?", "BEGIN IMMEDIATE"

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Return the result of `work` in a transaction that only reads. Raises Unserved and its errors."""
        return await self._on_thread(partial(self._transact, work, "BEGIN"))

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Return the result of `work` when its transaction is on disk; nothing of it is if it raises. Raises
        Unserved and its errors."""
        return await self._on_thread(partial(self._transact, work, self._begin))

    def close(self) -> None:
        """Close what is idle now, and other connections after their transactions."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while (connection := self._next_idle()) is not None:
            connection.close()

    async def _on_thread(self, call: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except TimeoutError:
            raise Unserved(f"the database has not answered for {ANSWER_S_MAX:g} s") from None

    def _transact(self, work: Callable[[Transaction], T], begin: str) -> T:
        connection: Any = None
        try:
            connection = self._begun(begin)
            try:
                found = work(Transaction(connection.cursor(), self._mark))
            except BaseException:
                connection.execute("ROLLBACK")
                self._keep(connection)
                raise
            connection.execute("COMMIT")
        except self._library.Error as error:
            if connection is not None:
                connection.close()
            if not self._is_down:
                log.warning("the database at %s: %s", self._settings, " ".join(f"{error}".split()))
            self._is_down = True
            raise Unserved("the database does not answer") from error
        self._keep(connection)
        if self._is_down:
            log.warning("the database at %s answers again", self._settings)
        self._is_down = False
        return found

    def _begun(self, begin: str) -> Any:  # noqa: ANN401 - of either library
        """Return a connection in a transaction: an idle one that still works, or a new one."""
        while (connection := self._next_idle()) is not None:
            try:
                connection.execute(begin)
            except self._library.Error:
                connection.close()
            else:
                return connection
        connection = self._connect()
        try:
            with self._making_tables:
                if not self._has_tables:
                    self._make_tables(connection)
                self._has_tables = True
            connection.execute(begin)
        except self._library.Error:
            connection.close()
            raise
        return connection

    def _next_idle(self) -> Any:  # noqa: ANN401 - of either library
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def _keep(self, connection: Any) -> None:  # noqa: ANN401 - of either library
        if self._is_closed:
            connection.close()
        else:
            self._idle.append(connection)

    def _connect(self) -> Any:  # noqa: ANN401 - of either library
        path = self._settings.path
        if path is None:
            connection = self._library.connect(
                self._settings.url,
                autocommit=True,  # we begin and commit ourselves
                connect_timeout=LOCK_S_MAX,
                tcp_user_timeout=LOCK_S_MAX * 1000,
                keepalives_idle=LOCK_S_MAX,  # a host that has vanished would hold a thread for hours
                keepalives_interval=1,
                prepare_threshold=None,  # a pool of connections may be between
            )
            connection.execute(f"SET statement_timeout = '{LOCK_S_MAX}s'")
            return connection
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE_MODE))
        except OSError as error:
            raise sqlite3.OperationalError(f"{path}: {error.strerror}") from error
        connection = sqlite3.connect(path, timeout=LOCK_S_MAX, isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {setting}")
        return connection

    def _make_tables(self, connection: Any) -> None:  # noqa: ANN401 - of either library
        """Make what is missing, while no other process does. The rest is not locked: an edge that starts
        would wait for those that write, and they for it."""
        if not self._missing(connection):
            return
        connection.execute(self._begin)
        if self._settings.path is None:
            connection.execute("SELECT pg_advisory_xact_lock(7433645)")
        for statement in self._missing(connection):
            connection.execute(statement)
        connection.execute("COMMIT")

    def _missing(self, connection: Any) -> list[str]:  # noqa: ANN401 - of either library
        """Return the statements whose table or index is not there."""
        find = "SELECT MAX(name) FROM sqlite_master WHERE name = ?"
        if self._settings.path is None:
            find = "SELECT to_regclass(%s)"

        def is_missing(statement: str) -> bool:
            name = statement.partition("IF NOT EXISTS ")[2].split()[0]
            return connection.execute(find, [name]).fetchone()[0] is None

        return [statement for statement in TABLES if is_missing(statement)]
