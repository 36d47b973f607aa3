"""A Postgres of the tests: its own process and folder, reached through a Unix socket."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg import sql

INSTALLED = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
BINARIES = INSTALLED[-1].parent if INSTALLED else None
MISSING = "there is no Postgres: as root, apt-get install postgresql"
USER = "postgres" if os.getuid() == 0 else None
"""Postgres refuses to run as root."""


class Postgres:
    """A server that can be stopped and started again. `url` is that of its database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if USER is not None:
            shutil.chown(folder, USER)
        self._run("initdb", "--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8")
        self.url = f"postgresql://postgres@/postgres?host={folder}"

    def new_database(self) -> str:
        """Make a database and return its URL."""
        name = f"d{uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url.replace("/postgres?", f"/{name}?")

    def start(self) -> None:
        settings = f"-c listen_addresses= -c unix_socket_directories={self._folder} -c fsync=off"
        self._run(
            "pg_ctl", "start", "--wait", "--silent", f"--log={self._folder}/log", f"--options={settings}"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "--wait", "--silent", "--mode=immediate")

    def _run(self, program: str, *arguments: str) -> None:
        assert BINARIES is not None, MISSING
        command = [str(BINARIES / program), *arguments, "--pgdata", str(self._folder / "data")]
        subprocess.run(command, check=True, user=USER, cwd=self._folder, stdout=subprocess.DEVNULL)


@contextmanager
def running_postgres() -> Generator[Postgres]:
    """Yield a running server; nothing is left of it."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a short path, for its socket
    postgres = Postgres(folder)
    postgres.start()
    try:
        yield postgres
    finally:
        postgres.stop()
        shutil.rmtree(folder)
