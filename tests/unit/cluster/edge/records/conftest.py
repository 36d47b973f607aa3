"""The databases of this folder's tests."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.postgres import BINARIES, MISSING, Postgres, running_postgres
from tests.support.cluster.stored import TTL_S, check_accounts
from tidemill.cluster.edge.records.database import DatabaseSettings, database_settings
from tidemill.cluster.processes.endpoint import batch_lane


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "RENEW_S", "RETRY_S"):
        monkeypatch.setattr(batch_lane, name, 0.02)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if BINARIES is None:
        pytest.skip(MISSING)
    with running_postgres() as postgres:
        yield postgres


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DatabaseSettings]:
    """A new database, whose accounts are right whatever a test did."""
    if request.param == "sqlite":
        url = str(tmp_path / "stored.db")
    else:
        postgres: Postgres = request.getfixturevalue("postgres")
        url = postgres.new_database()
    yield (settings := database_settings(url, TTL_S))
    asyncio.run(check_accounts(settings))
