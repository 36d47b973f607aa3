"""Edges with a database, and clients of them."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4

from openai import AsyncOpenAI

from tests.support.cluster.fake_service import FakeService, serving, sources
from tests.unit.cluster.edge.http.test_tools import tokenizer
from tidemill.cluster.edge.http.app import app_of
from tidemill.cluster.edge.records.account import ROW_BYTES, size
from tidemill.cluster.edge.records.database import Database, DatabaseSettings, Transaction
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.context import EdgeContext, open_context, with_database
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import ServedBackend

Kind = TypeVar("Kind")
Write = Callable[[Callable[[Kind], Any]], Coroutine[Any, Any, Any]]
"""Writes records of a kind of one tenant."""

TTL_S = 1000.0
NOW_S = 1_700_000_123.5


def edge_over(
    service: FakeService,
    database: DatabaseSettings,
    keys: tuple[str, ...] = ("none",),
    unix_time_s: Callable[[], float] = lambda: NOW_S,
    limits: EdgeLimits | None = None,
) -> EdgeContext:
    """An edge with a database; to be closed."""
    known = [ApiKey(tenant=key, sha256=sha256(key.encode()).hexdigest()) for key in keys if key != "none"]
    own = replace(sources(), new_id=lambda: uuid4().hex, unix_time_s=unix_time_s)
    context = open_context([ServedBackend(service, tokenizer())], own, keys=known, limits=limits)
    return with_database(context, database)


def limit_keys(edge: EdgeContext, **limits: int | None) -> None:
    """Give all keys of an edge these limits."""
    edge.keys.replace([key.model_copy(update=limits) for key in edge.keys.known])


async def rows_of(database: DatabaseSettings, *tables: str) -> list[int]:
    """Return the numbers of rows of tables."""
    own = Database(database)
    queries = [f"SELECT COUNT(*) FROM tidemill_{table}" for table in tables]  # noqa: S608 - ours
    found = [await own.read(lambda sent, query=query: sent.rows(query)) for query in queries]
    own.close()
    return [rows[0][0] for rows in found]


async def check_accounts(database: DatabaseSettings) -> None:
    """Assert that each record, and each account, counts what is there."""
    own = Database(database)
    counted, accounts = await own.read(_found)
    own.close()
    assert all(stored == found for _, stored, found in counted), counted
    sums = Counter[str]()
    for tenant, stored, _ in counted:
        sums[tenant if tenant.startswith("tenant:") else ""] += stored
    assert +Counter(accounts) == +sums


def _found(sent: Transaction) -> tuple[list[tuple[str, int, int]], dict[str, int]]:
    """The tenants of all records, the bytes that they count and those that they have; and the accounts."""
    counted: list[tuple[str, int, int]] = []
    for name, tenant, stored, metadata in sent.rows(
        "SELECT id, tenant, stored_bytes, metadata FROM tidemill_conversations"
    ):
        bodies = [
            body
            for table in ("items", "responses")
            for (body,) in sent.rows(f"SELECT body FROM tidemill_{table} WHERE conversation = ?", name)  # noqa: S608
        ]
        counted.append((tenant, stored, size(metadata) + sum(map(size, bodies))))
    for name, tenant, stored in sent.rows("SELECT id, tenant, stored_bytes FROM tidemill_batches"):
        lines = sent.rows(
            "SELECT custom_id, sort_key, body, result FROM tidemill_lines WHERE batch = ?", name
        )
        found = sum(ROW_BYTES + sum(len(part or "") for part in line) for line in lines)
        counted.append((tenant, stored, ROW_BYTES + found))
    for name, tenant, stored, batch in sent.rows(
        "SELECT id, tenant, stored_bytes, batch FROM tidemill_files"
    ):
        parts = sent.rows("SELECT body FROM tidemill_parts WHERE file = ?", name)
        found = ROW_BYTES + sum(ROW_BYTES + len(part) for (part,) in parts)
        counted.append((tenant, stored, 0 if batch else found))
    return counted, dict(sent.rows("SELECT name, stored_bytes FROM tidemill_accounts"))


@asynccontextmanager
async def clients_of(*edges: EdgeContext, keys: tuple[str, ...] = ("none",)) -> AsyncGenerator[list[Any]]:
    """A client with each key of each edge, without the types of its many options."""
    async with AsyncExitStack() as group:
        for edge in edges:
            assert edge.records is not None
            group.callback(edge.records.close)
        urls = [await group.enter_async_context(serving(app_of(edge))) for edge in edges]
        yield [
            await group.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0))
            for url in urls
            for key in keys
        ]


@asynccontextmanager
async def clients(
    service: FakeService, *databases: DatabaseSettings, keys: tuple[str, ...] = ("none",)
) -> AsyncGenerator[list[Any]]:
    """A client with each key of an edge with each database."""
    edges = [edge_over(service, database, keys) for database in databases]
    async with clients_of(*edges, keys=keys) as opened:
        yield opened
