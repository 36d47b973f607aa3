"""Edges with a database, and clients of them."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any
from uuid import uuid4

from openai import AsyncOpenAI

from tests.support.cluster.fake_service import FakeService, serving, sources
from tests.unit.cluster.edge.http.test_tools import tokenizer
from tidemill.cluster.edge.http.app import app_of
from tidemill.cluster.edge.records.database import DatabaseSettings
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.context import EdgeContext, open_context, with_database
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.models import ServedBackend

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
