"""The quota of a tenant's records, and the time for which they are stored."""

import asyncio
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any

import openai
import pytest

from tests.support.cluster.fake_service import FakeService, saying
from tests.support.cluster.stored import NOW_S, TTL_S, clients_of, edge_over, limit_keys
from tests.unit.cluster.edge.records.test_batches import (
    ended,
    jsonl,
    line,
    lines_of,
    running,
    started,
)
from tidemill.cluster.edge.records import batches
from tidemill.cluster.edge.records.account import TenantLimits
from tidemill.cluster.edge.records.batches import StoredBatch, TenantBatches
from tidemill.cluster.edge.records.conversations import StoredConversation, TenantConversations
from tidemill.cluster.edge.records.database import Database, DatabaseSettings
from tidemill.cluster.edge.records.store import GRACE_S, Records
from tidemill.cluster.processes.endpoint import batch_lane
from tidemill.workers.messages import Request, RequestError

KEYS = ("mine", "yours")
ITEM: Any = {"type": "message", "role": "user", "content": "a"}


async def test_tenant_stores_no_more_than_its_bytes_and_loses_nothing(database: DatabaseSettings) -> None:
    service = FakeService(saying("here"))
    edge = edge_over(service, database, KEYS)
    limit_keys(edge, max_stored_bytes=20_000)
    async with clients_of(edge, keys=KEYS) as (mine, yours):
        made = await mine.conversations.create(items=[ITEM])
        kept: list[Any] = []

        async def fill() -> None:
            while len(kept) < 100:
                kept.append(await mine.responses.create(model="keeper", input="a" * 500))

        with pytest.raises(openai.APIStatusError) as refused:
            await fill()
        assert (refused.value.status_code, refused.value.code) == (413, "storage_quota_exceeded")
        assert "delete responses, conversations or files" in str(refused.value)
        num_asked = len(service.requests)
        attempts: list[Callable[[], Any]] = [
            lambda: mine.responses.create(model="keeper", input="a" * 6_000),
            lambda: mine.conversations.create(items=[ITEM] * 20),
            lambda: mine.conversations.items.create(made.id, items=[ITEM] * 20),
            lambda: mine.files.create(file=BytesIO(bytes(20_000)), purpose="user_data"),
            lambda: mine.conversations.update(made.id, metadata={str(at): "a" * 500 for at in range(16)}),
        ]
        for attempt in attempts:
            with pytest.raises(openai.APIStatusError, match="larger max_stored_bytes"):
                await attempt()
        assert len(service.requests) == num_asked, "it is refused before it is computed"
        async with mine.responses.stream(model="keeper", input="a" * 500, store=False) as stream:
            assert [event async for event in stream][-1].type == "response.completed"
        await yours.responses.create(model="keeper", input="a" * 500)
        for response in kept:
            assert await mine.responses.retrieve(response.id) == response
        assert len((await mine.conversations.items.list(made.id)).data) == 1
        await mine.responses.delete(kept[0].id)
        await mine.responses.create(model="keeper", input="a" * 500)


async def test_clients_without_a_known_key_have_one_quota(database: DatabaseSettings) -> None:
    """They would have as many quotas as they make keys."""
    records = Records(Database(database), TTL_S, lambda: NOW_S, lambda _: TenantLimits(stored_bytes=1200))
    for name in ("key:a", "", "key:b"):
        new = StoredConversation(f"conv_{name}", 0)
        work = records.write(name, TenantConversations, lambda own, new=new: own.create(new))
        if name == "key:b":
            with pytest.raises(RequestError, match="max_stored_bytes"):
                await work
        else:
            await work
    records.close()


async def test_batch_beyond_a_quota_fails_and_its_results_are_bounded(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lane, "LINES", 1)
    monkeypatch.setattr(batches, "OPEN_MAX", 2)
    service: FakeService

    def script(request: Request) -> Any:  # noqa: ANN401 - as `saying`
        if len(service.requests) == 3:
            limit_keys(edge, max_stored_bytes=1)
        return saying("a")(request)

    service = FakeService(script)
    edge = edge_over(service, database, ("mine",))
    async with clients_of(edge, keys=("mine",)) as (mine,):
        content = jsonl(*(line(str(at)) for at in range(9)))
        limit_keys(edge, max_stored_bytes=6_000)
        with pytest.raises(openai.APIStatusError, match="larger max_stored_bytes"):
            await started(mine, content * 9)
        async with running(edge):
            batch = await ended(mine, await started(mine, content))
            assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_quota_exceeded")
            limit_keys(edge, max_stored_bytes=None, max_queued_batch_requests=8)
            batch = await ended(mine, await started(mine, content))
            assert (batch.status, batch.errors.data[0].code) == ("failed", "batch_queue_full")
            limit_keys(edge, max_queued_batch_requests=9)
            batch = await ended(mine, await started(mine, content))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 6)
        assert len(service.requests) == 3, "no line is computed for nothing"
        errors = await lines_of(mine, batch.error_file_id)
        assert {each["response"]["status_code"] for each in errors.values()} == {413}
        assert len(await lines_of(mine, batch.output_file_id)) == 3
        limit_keys(edge, max_stored_bytes=None)
        waiting = [await started(mine, content) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="at most 2 batches"):
            await started(mine, content)
        assert (await mine.batches.cancel(waiting[0].id)).status == "cancelling"
        async with running(edge):
            for batch in waiting:
                await ended(mine, batch)
        await started(mine, content)


async def test_batches_of_tenants_alternate(database: DatabaseSettings) -> None:
    now_s = [NOW_S]
    records = Records(Database(database), TTL_S, lambda: now_s[0])
    shown = {"status": "validating", "request_counts": {"total": 0}}

    async def write(work: Callable[[TenantBatches], Any], tenant: str = "") -> Any:  # noqa: ANN401 - of the work
        return await records.write(tenant, TenantBatches, work)

    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        batch = StoredBatch(name, name[0], "", shown)
        await write(lambda own, batch=batch: own.create(batch), name[0])
        now_s[0] += 1
    ran: list[str] = []
    for _ in range(3):
        ran.append((await write(lambda own: own.claim("edge"))).id)
        now_s[0] += 1
        waits = [await write(TenantBatches.others_wait, tenant) for tenant in "abc"]
        assert waits == [False] * 3 if len(ran) == 3 else any(waits)
    for name in ran:
        await write(lambda own, name=name: own.end(name, "edge", "completed"), name[0])
    for _ in range(3):
        ran.append((await write(lambda own: own.claim("edge"))).id)
        if ran[-1] == "a2":
            now_s[0] += 1
            await write(lambda own: own.release("a2", "edge"), "a")
    assert ran == ["a1", "b1", "c1", "a2", "b2", "a2"], "another tenant is first, and then what is left"
    records.close()


async def test_batch_lets_another_tenant_run_and_each_line_is_answered_once(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BATCHES": 1, "LINES": 2, "SLICE_S": 0.0}.items():
        monkeypatch.setattr(batch_lane, name, value)
    service = FakeService(saying("a"), delay_s=0.02)
    edge = edge_over(service, database, KEYS, unix_time_s=time.time)
    async with clients_of(edge, keys=KEYS) as (mine, yours), running(edge):
        content = jsonl(*(line(str(at)) for at in range(30)))
        made = [(client, await started(client, content)) for client in (mine, mine, yours)]
        for client, batch in made:
            done = await ended(client, batch)
            assert (done.status, len(await lines_of(client, done.output_file_id))) == ("completed", 30)
    tenants = [request.tenant for request in service.requests]
    assert len(tenants) == 90
    assert tenants.index("tenant:yours") < 30, "the other one waits for no whole batch"


async def test_lines_of_all_batches_are_bounded_and_leave_the_limits_of_a_key(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of two batches wait at a worker; the key may ask one thing at a time."""
    monkeypatch.setattr(batch_lane, "LINES_TOGETHER", 2)
    service = FakeService(saying("a"), free=0)
    edge = edge_over(service, database, ("mine",))
    limit_keys(edge, max_parallel_requests=2)
    async with clients_of(edge, keys=("mine",)) as (mine,):
        content = jsonl(*(line(str(at)) for at in range(9)))
        for _ in range(2):
            await started(mine, content)
        async with running(edge), asyncio.timeout(20):
            await service.stalled.wait()
            await asyncio.sleep(0.3)
            assert edge.open_answers.held == 2
            service.free = 99
            assert (await mine.responses.create(model="keeper", input="a")).status == "completed"


async def test_batch_and_its_files_outlast_the_time_for_records(database: DatabaseSettings) -> None:
    """The window of the batch is longer than that time, and no edge runs it before."""
    now_s = [NOW_S]
    edge = edge_over(FakeService(saying("a")), database, unix_time_s=lambda: now_s[0])
    assert edge.records is not None
    async with clients_of(edge) as (client,):
        batch = await started(client, jsonl(line("a")))
        now_s[0] += TTL_S + GRACE_S + 1
        await edge.records.expire()
        assert [each.id async for each in await client.batches.list()] == [batch.id]
        assert (await client.files.retrieve(batch.input_file_id)).expires_at == batch.expires_at
        async with running(edge):
            batch = await ended(client, batch)
        assert batch.status == "completed", batch
        now_s[0] += TTL_S - 1
        await edge.records.expire()
        assert len(await lines_of(client, batch.output_file_id)) == 1
        now_s[0] += 2
        for gone in (client.batches.retrieve(batch.id), client.files.content(batch.output_file_id)):
            with pytest.raises(openai.NotFoundError):
                await gone
        now_s[0] = batch.expires_at + GRACE_S + 1
        await edge.records.expire()
        assert [each.id async for each in await client.files.list()] == []


async def test_conversation_that_expires_while_it_is_answered_gets_the_answer(
    database: DatabaseSettings,
) -> None:
    now_s = [NOW_S]
    going, end = asyncio.Event(), asyncio.Event()

    class Slow(FakeService):
        async def stream(self, request: Request, emit: Any) -> None:  # noqa: ANN401 - as FakeService
            going.set()
            await end.wait()
            await super().stream(request, emit)

    edge = edge_over(Slow(saying("here")), database, unix_time_s=lambda: now_s[0])
    assert edge.records is not None
    async with clients_of(edge) as (client,):
        made = await client.conversations.create(items=[ITEM])
        asked = asyncio.create_task(client.responses.create(model="keeper", input="b", conversation=made.id))
        await going.wait()
        now_s[0] += TTL_S + 100
        await edge.records.expire()
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.create(made.id, items=[ITEM])
        end.set()
        await asked
        assert len((await client.conversations.items.list(made.id)).data) == 3
