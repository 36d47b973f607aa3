"""The databases of this folder's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.postgres import BINARIES, MISSING, Postgres, running_postgres
from tests.support.cluster.stored import TTL_S
from tidemill.cluster.edge.records.database import DatabaseSettings, database_settings


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if BINARIES is None:
        pytest.skip(MISSING)
    with running_postgres() as postgres:
        yield postgres


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseSettings:
    """A new database."""
    if request.param == "sqlite":
        return database_settings(str(tmp_path / "stored.db"), TTL_S)
    postgres: Postgres = request.getfixturevalue("postgres")
    return database_settings(postgres.new_database(), TTL_S)
