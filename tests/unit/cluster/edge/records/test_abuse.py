"""Abuse of records: hostile lines, items and ids, floods, and databases that fail in the middle."""

import asyncio
import json
import resource
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, LiteralString

import httpx
import openai
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import FakeService, saying
from tests.support.cluster.postgres import BINARIES, MISSING, Postgres, running_postgres
from tests.support.cluster.stored import NOW_S, TTL_S, check_accounts, clients_of, edge_over, limit_keys
from tests.unit.cluster.edge.records.test_batches import (
    CHAT,
    completed,
    ended,
    jsonl,
    line,
    lines_of,
    running,
    started,
)
from tidemill.cluster.edge.apis.batch_lines import ERRORS_MAX, LINES_MAX, LineReader
from tidemill.cluster.edge.records import batches
from tidemill.cluster.edge.records import database as database_module
from tidemill.cluster.edge.records.account import ROW_BYTES
from tidemill.cluster.edge.records.database import DatabaseSettings, database_settings
from tidemill.cluster.edge.records.store import GRACE_S
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.cluster.processes.endpoint import batch_lane

KEYS = ("mine", "yours")
ITEM: Any = {"type": "message", "role": "user", "content": "a"}
GOOD = json.dumps(line("good")).encode()
NO_REQUEST, NO_JSON, COMPLEX = "invalid_request", "invalid_json_line", "body_too_complex"
HOSTILE = {
    "a NUL": (GOOD.replace(b"good", b"go\x00d"), NO_REQUEST),
    "half a pair": (GOOD.replace(b"good", b"\\ud800"), NO_REQUEST),
    "broken UTF-8": (GOOD.replace(b"good", b"\xff\xfe"), NO_JSON),
    "UTF-16": (GOOD.decode().encode("utf-16"), NO_REQUEST),
    "levels": (GOOD.replace(b'"Hello!"', b"[" * 200 + b"]" * 200), COMPLEX),
    "unclosed levels": (b"[" * 100_000, COMPLEX),
    "members": (b'{"a":' * 100 + b"1" + b"}" * 100, NO_REQUEST),
    "a number": (GOOD.replace(b'"Hello!"', b"9" * 5000), NO_JSON),
    "an infinite number": (GOOD.replace(b'"Hello!"', b"1e999"), NO_REQUEST),
    "NaN": (GOOD.replace(b'"Hello!"', b"NaN"), NO_REQUEST),
    "no object": (b"[1, 2]", NO_REQUEST),
    "no JSON": (b"{nothing}", NO_JSON),
    "an id alone": (b'{"custom_id": "b"}', NO_REQUEST),
    "a number as id": (GOOD.replace(b'"good"', b"5"), NO_REQUEST),
    "a long id": (GOOD.replace(b"good", b"a" * 513), "duplicate_custom_id"),
    "no id": (GOOD.replace(b'"good"', b'""'), "duplicate_custom_id"),
    "a body of text": (json.dumps({**line("a"), "body": "{}"}).encode(), NO_REQUEST),
    "another method": (GOOD.replace(b"POST", b"GET"), NO_REQUEST),
    "another endpoint": (GOOD.replace(CHAT.encode(), b"/v1/responses"), "invalid_url"),
    "a path of another server": (
        GOOD.replace(CHAT.encode(), b"http://host" + CHAT.encode()),
        "invalid_url",
    ),
    "cut": (GOOD[:-1], NO_JSON),
    "two in one": (GOOD + GOOD, NO_JSON),
    "too long": (GOOD.replace(b"Hello!", b"a" * BODY_BYTES_MAX), "line_too_long"),
}


SHORT = [wrong for wrong, _ in HOSTILE.values() if len(wrong) <= 100_000]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_line_is_named_and_the_next_ones_are_read(name: str) -> None:
    reader = LineReader(CHAT)
    wrong, code = HOSTILE[name]
    found = list(reader.feed(b"%b\n\n%b\n%b" % (wrong, GOOD, GOOD), is_last=True))
    assert [each.custom_id for each in found] == ['"good"']
    errors = [(error["line"], error["code"]) for error in reader.errors]
    assert errors == [(1, code), (4, "duplicate_custom_id")]
    assert len(json.dumps(reader.errors)) < 1000


@given(st.lists(st.sampled_from([*SHORT, GOOD]) | st.binary(max_size=40), max_size=30))
def test_any_bytes_are_lines_or_errors(lines: list[bytes]) -> None:
    reader = LineReader(CHAT)
    found = list(reader.feed(b"\n".join(lines), is_last=True))
    assert len(found) <= 1, "they have one id"
    assert len(found) + len(reader.errors) == reader.count
    for each in found:
        json.loads(each.body)


def test_file_of_too_many_lines_has_few_errors_and_takes_no_memory() -> None:
    reader = LineReader(CHAT)
    start_s = time.process_time()
    found = sum(1 for _ in reader.feed(b"\n" * (4 << 20)))
    found += sum(
        1
        for index in range(LINES_MAX + 10_000)
        for _ in reader.feed(GOOD.replace(b"good", b"%d" % index) + b"\n")
    )
    assert (found, len(reader.errors)) == (LINES_MAX, ERRORS_MAX)
    assert time.process_time() - start_s < 60.0


async def test_hostile_bodies_are_errors_of_their_lines(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": 5},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"n": 10**9},
        {"max_tokens": 10**400},
        {"seed": -(10**30)},
        {"tools": [{"type": "function", "function": {"name": "a" * 5000}}]},
        {"stream": True},
        {"model": "a\x00b"},
        {"logit_bias": {"a": 1}},
        {"input": "of another endpoint", "messages": None},
    ]
    service = FakeService(saying("a"))
    edge = edge_over(service, database_settings(str(tmp_path / "stored.db"), TTL_S))
    async with clients_of(edge) as (client,), running(edge), asyncio.timeout(60):
        content = jsonl(*(line(str(at), **body) for at, body in enumerate(bodies)), line("good"))
        batch = await ended(client, await started(client, content))
        assert batch.status == "completed", batch
        errors = await lines_of(client, batch.error_file_id)
        statuses = {name: each["response"]["status_code"] for name, each in errors.items()}
        assert sorted(map(int, statuses)) == list(range(len(bodies)))
        assert set(statuses.values()) <= {400, 404}, statuses
        assert (await lines_of(client, batch.output_file_id)).keys() == {"good"}


async def test_hostile_items_are_refused_or_come_back(database: DatabaseSettings) -> None:
    texts = ["\x00", "\u2028\U0001f600", "a" * 100_000, "'; DROP TABLE tidemill_items; --", "?%s{}"]
    edge = edge_over(FakeService(saying("here")), database)
    headers = {"authorization": "Bearer none"}
    async with (
        clients_of(edge) as (client,),
        httpx.AsyncClient(base_url=str(client.base_url), headers=headers) as plain,
    ):
        made = await client.conversations.create(items=[{**ITEM, "content": text} for text in texts])
        found = [item async for item in await client.conversations.items.list(made.id, order="asc")]
        assert [item.content[0].text for item in found] == texts
        bad: list[Any] = [
            None,
            [None],
            [5],
            [[]],
            [{**ITEM, "type": "\x00"}],
            [{**ITEM, "role": 5}],
            [{"type": "function_call"}],
            [{**ITEM, "content": [{"type": "input_text", "text": 5}]}],
            [{"type": "item_reference", "id": None}],
        ]
        url = f"conversations/{made.id}/items"
        for items in bad:
            reply = await plain.post(url, json={"items": items})
            assert 400 <= reply.status_code < 500, (items, reply.text)
        for name in ("\x00", "a b", "é", "a" * 500, 5, ["a"], None):
            reply = await plain.post(url, json={"items": [{**ITEM, "id": name}]})
            assert reply.status_code in {200, 400}, (name, reply.text)
        deep = b'{"items": [' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"]}"
        reply = await plain.post(url, content=deep, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "body_too_complex")
        nuls = ("responses/%00", "conversations/%00/items", "files/%00", "files?after=%00")
        for path in (*nuls, "batches/%27%3B--"):
            assert 400 <= (await plain.get(path)).status_code < 500, path


async def test_flood_of_small_records_ends_at_the_quota_and_expires(database: DatabaseSettings) -> None:
    now_s = [NOW_S]
    edge = edge_over(FakeService(saying("a")), database, ("mine",), unix_time_s=lambda: now_s[0])
    limit_keys(edge, max_stored_bytes=100 * ROW_BYTES)
    assert edge.records is not None
    async with clients_of(edge, keys=("mine",)) as (mine,):
        file = await mine.files.create(file=BytesIO(b""), purpose="batch")
        flood = [mine.conversations.create() for _ in range(60)]
        flood += [mine.files.create(file=BytesIO(b""), purpose="batch") for _ in range(20)]
        flood += [
            mine.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1m")
            for _ in range(60)
        ]
        answers = await asyncio.gather(*flood, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, openai.APIStatusError)]
        assert {answer.status_code for answer in refused} == {413}
        kept = len(answers) - len(refused)
        assert 0 < kept < 100
        async with running(edge), asyncio.timeout(60):
            now_s[0] += 61
            for batch in (await mine.batches.list(limit=100)).data:
                assert (await ended(mine, batch)).status == "expired"
        now_s[0] += TTL_S + GRACE_S + 1
        await edge.records.expire()
        await asyncio.gather(*(mine.conversations.create() for _ in range(90)))


@asynccontextmanager
async def locked(path: Path) -> AsyncGenerator[None]:
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    yield
    lock.close()


@asynccontextmanager
async def full(path: Path) -> AsyncGenerator[None]:
    """The write-ahead log of the database cannot grow. It is emptied and written, because after a checkpoint
    it would be written again from its begin."""
    log, before = path.with_name(f"{path.name}-wal"), resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(sqlite3.connect(path, isolation_level=None)) as filler:
        filler.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        filler.execute("CREATE TABLE filler AS SELECT zeroblob(400000)")
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@asynccontextmanager
async def killed(postgres: Postgres) -> AsyncGenerator[None]:
    await asyncio.to_thread(postgres.stop)
    yield
    await asyncio.to_thread(postgres.start)


def run_sql(postgres: Postgres, *statements: LiteralString) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@asynccontextmanager
async def read_only(postgres: Postgres) -> AsyncGenerator[None]:
    """A database like that after a switch to a standby."""
    run_sql(postgres, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    await asyncio.sleep(0.3)
    yield
    run_sql(
        postgres,
        "SET default_transaction_read_only = off",
        "ALTER SYSTEM RESET default_transaction_read_only",
        "SELECT pg_reload_conf()",
    )


@pytest.mark.parametrize("fault", [locked, full, killed, read_only])
async def test_batch_and_records_outlast_a_fault_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], AbstractAsyncContextManager[None]]
) -> None:
    monkeypatch.setattr(database_module, "LOCK_S_MAX", 0.2 if fault is locked else 2)
    monkeypatch.setattr(batches, "LEASE_S", 2)
    if fault in (locked, full):
        database = database_settings(str(tmp_path / "stored.db"), TTL_S)
        assert database.path is not None
        await outlasts(database, partial(fault, database.path), can_read=True)
    elif BINARIES is None:
        pytest.skip(MISSING)
    else:
        with running_postgres() as postgres:
            database = database_settings(postgres.url, TTL_S)
            await outlasts(database, partial(fault, postgres), can_read=fault is read_only)


async def outlasts(
    database: DatabaseSettings, fault: Callable[[], AbstractAsyncContextManager[None]], *, can_read: bool
) -> None:
    service = FakeService(saying("a"), delay_s=0.1)
    edge = edge_over(service, database, unix_time_s=time.time)
    async with clients_of(edge) as (client,), running(edge), asyncio.timeout(90):
        kept = await client.responses.create(model="keeper", input="a")
        batch = await started(client, jsonl(*(line(str(at)) for at in range(120))))
        await completed(client, batch, 5)
        async with fault():
            with pytest.raises(openai.InternalServerError, match="the database does not answer") as refused:
                await client.responses.create(model="keeper", input="b")
            assert refused.value.status_code == 503
            assert (await client.responses.create(model="keeper", input="b", store=False)).output
            if can_read:
                streamed = await client.responses.create(model="keeper", input="b", stream=True)
                last = [event async for event in streamed][-1]
                assert last.type == "response.failed"
                assert "the database does not answer" in last.response.error.message
                assert await client.responses.retrieve(kept.id) == kept, "readers do not wait for writers"
            else:
                with pytest.raises(openai.InternalServerError, match="the database does not answer"):
                    await client.responses.retrieve(kept.id)
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 120)
        assert len(await lines_of(client, batch.output_file_id)) == 120
        assert len(service.requests) <= 120 + 3 + 2 * batch_lane.LINES, (
            "what has a result is not computed again"
        )
        assert await client.responses.retrieve(kept.id) == kept
        await client.responses.create(model="keeper", input="c", previous_response_id=kept.id)
        await check_accounts(database)
