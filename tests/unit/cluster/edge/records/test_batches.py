"""Files and batches with the `openai` SDK over a real socket, in SQLite and in Postgres."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, reduce
from io import BytesIO
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import MODEL, FakeService, saying
from tests.support.cluster.stored import NOW_S, TTL_S, Write, clients, clients_of, edge_over, rows_of
from tests.unit.cluster.edge.http.test_tools import prompts_of
from tidemill.cluster.edge.apis import batch_lines
from tidemill.cluster.edge.apis.batch_lines import LineReader, sort_key
from tidemill.cluster.edge.chat.request.hints import PRIORITY_MAX
from tidemill.cluster.edge.http import batches as routes
from tidemill.cluster.edge.http.app import APIS
from tidemill.cluster.edge.http.batches import PART_BYTES
from tidemill.cluster.edge.http.middleware import UPLOAD_BYTES
from tidemill.cluster.edge.http.multipart import MultipartReader
from tidemill.cluster.edge.records import files
from tidemill.cluster.edge.records.account import ROW_BYTES, TenantLimits
from tidemill.cluster.edge.records.batches import (
    LEASE_S,
    LeaseLost,
    StoredBatch,
    StoredLine,
    TenantBatches,
)
from tidemill.cluster.edge.records.database import Database, DatabaseSettings, database_settings
from tidemill.cluster.edge.records.files import StoredFile, TenantFiles
from tidemill.cluster.edge.records.store import GRACE_S, Records
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.processes.endpoint import batch_lane
from tidemill.cluster.processes.endpoint.batch_lane import BatchLane
from tidemill.workers.messages import (
    Overloaded,
    Poisonous,
    Pooling,
    RequestError,
    Unserved,
)

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello!"}]
POLL_S = 0.02
ENDED = ("completed", "failed", "expired", "cancelled")


def line(name: str, url: str = CHAT, **fields: object) -> dict[str, object]:
    body = {"model": "keeper", **({"messages": HELLO} if url == CHAT else {}), **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def started(client: Any, content: bytes, endpoint: str = CHAT, **more: object) -> Any:  # noqa: ANN401 - SDK
    file = await client.files.create(file=("in.jsonl", BytesIO(content)), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
    return await client.batches.create(**{**asked, **more})


async def ended(client: Any, batch: Any) -> Any:  # noqa: ANN401 - SDK
    while batch.status not in ENDED:
        await asyncio.sleep(POLL_S)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def completed(client: Any, batch: Any, least: int) -> None:  # noqa: ANN401 - SDK
    """Wait until at least this many lines of a batch are answered."""
    count = 0
    while count < least:
        await asyncio.sleep(POLL_S)
        count = (await client.batches.retrieve(batch.id)).request_counts.completed


async def lines_of(client: Any, file: str | None) -> dict[str, Any]:  # noqa: ANN401 - SDK
    """The lines of a file by custom_id, each there once."""
    if file is None:
        return {}
    content = await client.files.content(file)
    assert len(content.content) == (await client.files.retrieve(file)).bytes
    found = [json.loads(each) for each in content.text.splitlines()]
    by_name = {each["custom_id"]: each for each in found}
    assert len(by_name) == len(found)
    return by_name


@asynccontextmanager
async def running(*edges: EdgeContext) -> AsyncGenerator[None]:
    """Run the lanes of edges."""
    lanes = [BatchLane(edge, edge.records, APIS) for edge in edges if edge.records is not None]
    tasks = [asyncio.create_task(lane.run()) for lane in lanes]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("endpoint", "asked", "where"),
    [
        (CHAT, {"messages": HELLO}, ("choices", 0, "message", "content")),
        ("/v1/completions", {"prompt": "Hello"}, ("choices", 0, "text")),
        ("/v1/responses", {"input": "Hello"}, ("output", 0, "content", 0, "text")),
    ],
)
async def test_lines_are_answered_as_http_would(
    database: DatabaseSettings, endpoint: str, asked: dict[str, Any], where: tuple[str | int, ...]
) -> None:
    service = FakeService(saying("zoë is here"))
    edge = edge_over(service, database)
    async with clients_of(edge) as (client,), running(edge):
        good = [line(f"ë{index}", endpoint, **asked) for index in range(40)]
        wrong = [
            line("model", endpoint, **asked, model="other"),
            line("field", endpoint, **asked, temperature="hot"),
            line("stream", endpoint, **asked, stream=True),
        ]
        batch = await started(client, jsonl(*good, *wrong), endpoint, metadata={"a": "b"})
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"a": "b"})
        assert batch.expires_at - batch.created_at == 24 * 3600
        batch = await ended(client, batch)
        assert batch.status == "completed", batch
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (43, 40, 3)
        assert batch.in_progress_at is not None
        answers = await lines_of(client, batch.output_file_id)
        assert answers.keys() == {f"ë{index}" for index in range(40)}
        for answer in answers.values():
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            assert reduce(getitem, where, answer["response"]["body"]) == "zoë is here"
        errors = await lines_of(client, batch.error_file_id)
        statuses = {name: each["response"]["status_code"] for name, each in errors.items()}
        assert statuses == {"model": 404, "field": 400, "stream": 400}
        assert errors["field"]["response"]["body"]["error"]["param"] == "temperature"
        assert [each.id async for each in await client.batches.list(limit=1)] == [batch.id]
        listed = [each.id async for each in await client.files.list()]
        assert {batch.input_file_id, batch.output_file_id, batch.error_file_id} <= set(listed)
        assert batch.output_file_id not in [
            each.id async for each in await client.files.list(purpose="batch")
        ]
        for name in (batch.input_file_id, batch.output_file_id):
            assert (await client.files.delete(name)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.content(name)
        assert len(await lines_of(client, batch.error_file_id)) == 3
    assert {request.priority for request in service.requests} == {PRIORITY_MAX}


async def test_batch_of_embeddings(tmp_path: Path) -> None:
    database = database_settings(str(tmp_path / "stored.db"), TTL_S)
    for pooling, status in ((Pooling(kind="embed", size=2), 200), (None, 400)):
        model = replace(MODEL, pooling=pooling)
        service = FakeService(lambda _: [], pooled=lambda _: [3.0, 4.0], model=model)
        edge = edge_over(service, database)
        async with clients_of(edge) as (client,), running(edge):
            made = await started(client, jsonl(line("a", "/v1/embeddings", input="b")), "/v1/embeddings")
            batch = await ended(client, made)
            lines = await lines_of(client, batch.output_file_id or batch.error_file_id)
            assert lines["a"]["response"]["status_code"] == status
            if pooling is not None:
                (row,) = lines["a"]["response"]["body"]["data"]
                assert row["embedding"] == pytest.approx([0.6, 0.8])


async def test_neighbours_have_prefixes_in_common(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lane, "LINES", 1)
    service = FakeService(saying("a"))
    edge = edge_over(service, database)
    systems = ["You are short." * 4, "You are long." * 4, "Du bist kurz." * 4]
    async with clients_of(edge) as (client,), running(edge):
        lines = [
            line(str(index), messages=[{"role": "system", "content": systems[index % 3]}, *HELLO])
            for index in range(12)
        ]
        await ended(client, await started(client, jsonl(*lines)))
    seen = [next(system for system in systems if system in prompt) for prompt in prompts_of(service)]
    assert sum(here != there for here, there in pairwise(seen)) == 2


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl(*(line(str(index)) for index in range(51))), "too_many_lines", 51),
        (jsonl(line("a")) + b"\n" + jsonl(line("a")), "duplicate_custom_id", 3),
    ],
)
async def test_file_that_is_no_batch_fails_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, code: str, number: int | None
) -> None:
    monkeypatch.setattr(batch_lines, "LINES_MAX", 50)
    service = FakeService(saying("a"))
    edge = edge_over(service, database_settings(str(tmp_path / "stored.db"), TTL_S))
    async with clients_of(edge) as (client,), running(edge):
        batch = await ended(client, await started(client, content))
        assert batch.status == "failed"
        error = batch.errors.data[0]
        assert (error.code, error.line) == (code, number)
        assert batch.output_file_id is None
    assert service.requests == []


@given(st.lists(st.integers(1, 40)))
def test_lines_are_read_whatever_the_pieces(cuts: list[int]) -> None:
    content = jsonl(*(line(f"{index}", seed=index) for index in range(9)))
    reader = LineReader(CHAT)
    content = b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n")  # as some editors of Windows write it
    found = [each for piece in pieces(content, cuts) for each in reader.feed(piece)]
    found += reader.feed(b"", is_last=True)
    assert [each.custom_id for each in found] == [f'"{index}"' for index in range(9)]
    assert [each.number for each in found] == list(range(1, 10))
    assert reader.errors == []


def pieces(content: bytes, cuts: list[int]) -> list[bytes]:
    found: list[bytes] = []
    for cut in cuts:
        found.append(content[:cut])
        content = content[cut:]
    return [*found, content]


def test_equal_beginnings_sort_together_whatever_else_differs() -> None:
    one, two = ({"messages": HELLO, "seed": seed, "model": "a"} for seed in range(2))
    assert sort_key(one) == sort_key(two)
    assert sort_key(one) != sort_key({**one, "model": "b"})


async def test_full_or_lost_fleet_delays_lines_and_a_bug_ends_one(database: DatabaseSettings) -> None:
    full = Overloaded("full", predicted_s=1.0, retry_after_s=0.0)
    service = FakeService(
        saying("a"), moods=[full, Unserved("no worker"), KeyError("a"), Poisonous("it kills")]
    )
    edge = edge_over(service, database)
    async with clients_of(edge) as (client,), running(edge):
        batch = await ended(client, await started(client, jsonl(*(line(str(at)) for at in range(9)))))
        assert (batch.status, batch.request_counts.failed) == ("completed", 2)
        errors = await lines_of(client, batch.error_file_id)
        codes = {each["response"]["body"]["error"]["code"] for each in errors.values()}
        assert codes == {"internal_error", "poisonous"}
        assert len(await lines_of(client, batch.output_file_id)) == 7


async def test_cancelled_batch_keeps_what_is_answered(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lane, "LINES", 1)
    service = FakeService(saying("a b c"), free=2)
    edge = edge_over(service, database)
    async with clients_of(edge) as (client,), running(edge):
        lines = [line(f"{at}", messages=[{"role": "user", "content": f"{at}"}]) for at in range(5)]
        batch = await started(client, jsonl(*lines))
        await completed(client, batch, 2)
        await service.stalled.wait()
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert (batch.status, batch.error_file_id) == ("cancelled", None)
        assert len(await lines_of(client, batch.output_file_id)) == 2
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_expired_batch_names_the_lines_without_an_answer(database: DatabaseSettings) -> None:
    now_s = [NOW_S]
    service = FakeService(saying("a"), stall_at=0)
    edge = edge_over(service, database, unix_time_s=lambda: now_s[0])
    async with clients_of(edge) as (client,), running(edge):
        batch = await started(client, jsonl(line("a"), line("b")), completion_window="1m")
        await service.stalled.wait()
        now_s[0] += 61
        batch = await ended(client, batch)
        assert (batch.status, batch.output_file_id) == ("expired", None)
        errors = await lines_of(client, batch.error_file_id)
        assert {name: each["error"]["code"] for name, each in errors.items()} == dict.fromkeys(
            "ab", "batch_expired"
        )


async def test_one_edge_runs_a_batch_and_another_goes_on_when_it_is_gone(database: DatabaseSettings) -> None:
    now_s = [NOW_S]
    first, second = FakeService(saying("a"), free=99), FakeService(saying("a"), free=99)
    edges = [edge_over(service, database, unix_time_s=lambda: now_s[0]) for service in (first, second)]
    lines = [line(f"{at}", messages=[{"role": "user", "content": f"{at}"}]) for at in range(40)]
    async with clients_of(*edges) as (client, _):
        async with running(*edges):
            batch = await ended(client, await started(client, jsonl(*lines)))
            assert len(await lines_of(client, batch.output_file_id)) == 40
        assert sorted([len(first.requests), len(second.requests)]) == [0, 40]
        second.requests.clear()
        first.free = len(first.requests) + 5
        async with running(edges[0]):
            batch = await started(client, jsonl(*lines))
            await completed(client, batch, 5)
            await first.stalled.wait()
        async with running(edges[1]):
            await asyncio.sleep(0.1)
            assert second.requests == [], "the lease has not run out"
            now_s[0] += LEASE_S + 1
            batch = await ended(client, batch)
        assert batch.request_counts.completed == 40
        assert len(await lines_of(client, batch.output_file_id)) == 40
        assert len(second.requests) == 35


FORM = "multipart/form-data; boundary=x"
PART = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
INPUT = StoredFile("file-in", "in", "batch", int(NOW_S), int(NOW_S + TTL_S), 2)
LINES = [StoredLine(number, f'"{number}"', b"a", "{}") for number in range(3)]


async def runner_of(database: DatabaseSettings) -> tuple[Records, Write[TenantBatches], list[float]]:
    """The records with a batch that the edge "first" has leased and filled, a function that writes, and the
    time."""
    now_s = [NOW_S]
    records = Records(Database(database), TTL_S, lambda: now_s[0])
    write: Write[TenantBatches] = partial(records.write, "", TenantBatches)
    shown = {
        "status": "validating",
        "endpoint": CHAT,
        "expires_at": NOW_S + TTL_S,
        "request_counts": {"total": 0},
    }
    await write(lambda own: own.create(StoredBatch("batch_a", "", "", shown)))
    assert await write(lambda own: own.claim("first")) is not None
    assert await write(lambda own: own.claim("second")) is None
    await write(lambda own: own.add_lines("batch_a", "first", LINES))
    return records, write, now_s


async def test_edge_that_stood_still_changes_nothing(database: DatabaseSettings) -> None:
    records, write, now_s = await runner_of(database)
    now_s[0] += LEASE_S + 1
    assert await write(lambda own: own.claim("second")) is not None
    attempts: list[Callable[[TenantBatches], None]] = [
        lambda own: own.clear("batch_a", "first"),
        lambda own: own.begin("batch_a", "first", 9),
        lambda own: own.fail("batch_a", "first", []),
        lambda own: own.journal("batch_a", "first", 0, b"{}", is_error=False),
        lambda own: own.end("batch_a", "first", "completed"),
    ]
    for work in attempts:
        with pytest.raises(LeaseLost):
            await write(work)
    assert await write(lambda own: own.left("batch_a")) == [0, 1, 2]
    assert (await write(lambda own: own.batch("batch_a")))["status"] == "validating"
    records.close()


async def test_batch_that_is_cancelled_while_it_is_read_stays_cancelled(database: DatabaseSettings) -> None:
    records, write, _ = await runner_of(database)
    await write(lambda own: own.cancel("batch_a"))
    await write(lambda own: own.begin("batch_a", "first", 3))
    found = await write(lambda own: own.batch("batch_a"))
    assert (found["status"], found["request_counts"]["total"]) == ("cancelling", 3)
    service = FakeService(saying("a"))
    edge = edge_over(service, database, unix_time_s=lambda: NOW_S + LEASE_S + 1)
    async with running(edge), asyncio.timeout(20):
        while found["status"] != "cancelled":
            await asyncio.sleep(POLL_S)
            found = await write(lambda own: own.batch("batch_a"))
    assert service.requests == [], "another edge begins no line of it"
    assert edge.records is not None
    edge.records.close()
    records.close()


async def test_line_and_cancel_that_come_while_a_batch_ends_are_too_late(database: DatabaseSettings) -> None:
    records, write, _ = await runner_of(database)
    journal = partial(TenantBatches.journal, name="batch_a", owner="first", result=b"{}", is_error=False)
    await write(lambda own: own.begin("batch_a", "first", 3))
    await write(lambda own: journal(own, number=0))
    ending = threading.Event()

    def end(own: TenantBatches) -> None:
        own.end("batch_a", "first", "cancelled")
        ending.set()
        time.sleep(0.3)  # the others come before the transaction ends

    ended = asyncio.create_task(write(end))
    await asyncio.to_thread(ending.wait)
    results: tuple[Any, Any] = await asyncio.gather(
        write(lambda own: journal(own, number=1)),
        write(lambda own: own.cancel("batch_a")),
        return_exceptions=True,
    )
    late, found = results
    await ended
    assert isinstance(late, LeaseLost)
    assert found["status"] == "cancelled"
    assert not await write(TenantBatches.waits)
    file = await write(lambda own: own.files.file(found["output_file_id"]))
    _, content = await write(lambda own: own.files.chunk(file, -1))
    assert (len(content), found["request_counts"]) == (
        file.num_bytes,
        {"total": 3, "completed": 1, "failed": 0},
    )
    records.close()


async def test_files_of_a_tenant_are_bounded_with_uploads_in_progress(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [NOW_S]
    most = TenantLimits(stored_bytes=9 * ROW_BYTES)
    records = Records(Database(database), TTL_S, lambda: now_s[0], lambda _: most)
    write: Write[TenantFiles] = partial(records.write, "a", TenantFiles)
    with pytest.raises(RequestError, match="max_stored_bytes"):
        await write(lambda own: own.begin("file-0", 10 * ROW_BYTES))
    for number in range(3):
        await write(lambda own, number=number: own.begin(f"file-{number}", 2))
    await write(lambda own: own.add_part("file-0", 0, bytes(ROW_BYTES)))
    now_s[0] += files.UPLOAD_S_MAX - 1
    await write(lambda own: own.add_part("file-1", 0, bytes(2 * ROW_BYTES)))
    with pytest.raises(RequestError, match="you would store 4,609 bytes of at most 4,608"):
        await write(lambda own: own.add_part("file-2", 0, bytes(1)))
    await write(lambda own: own.finish(replace(INPUT, id="file-0", expires_s=int(now_s[0] + TTL_S))))
    monkeypatch.setattr(files, "TENANT_FILES_MAX", 3)
    with pytest.raises(RequestError, match="you have 3 files"):
        await write(lambda own: own.begin("file-3", 1))
    with pytest.raises(RequestError, match="you have 3 files"):
        await write(TenantFiles.check_count)
    now_s[0] += 2 + GRACE_S
    await records.expire()
    with pytest.raises(RequestError, match="not found"):
        await write(lambda own: own.add_part("file-2", 0, b"a"))
    await write(lambda own: own.add_part("file-1", 1, b"an upload that goes on is not removed"))
    records.close()


async def test_other_tenants_find_nothing_and_a_lost_key_ends_its_batches(database: DatabaseSettings) -> None:
    keys = ("mine", "yours")
    service = FakeService(saying("a"))
    edge = edge_over(service, database, keys)
    async with clients_of(edge, keys=keys) as (mine, yours):
        batch = await started(mine, jsonl(line("a")))
        for attempt in (
            yours.files.retrieve(batch.input_file_id),
            yours.files.content(batch.input_file_id),
            yours.files.delete(batch.input_file_id),
            yours.batches.retrieve(batch.id),
            yours.batches.cancel(batch.id),
            yours.files.list(after=batch.input_file_id),
            yours.batches.list(after=batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert (await yours.files.list()).data == (await yours.batches.list()).data == []
        with pytest.raises(openai.BadRequestError, match="not found"):
            await yours.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        known = edge.keys.known
        edge.keys.replace([key for key in known if key.tenant == "yours"])
        async with running(edge):
            assert edge.records is not None
            found: dict[str, Any] = {"status": ""}
            while found["status"] not in ENDED:
                await asyncio.sleep(POLL_S)
                found = await edge.records.read("tenant:mine", TenantBatches, lambda own: own.batch(batch.id))
        edge.keys.replace(known)
        batch = await mine.batches.retrieve(batch.id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_api_key")
        async with running(edge):
            batch = await ended(mine, await started(mine, jsonl(line("a"))))
        assert batch.status == "completed"
    assert {request.tenant for request in service.requests} == {"tenant:mine"}


async def test_file_is_bounded_checked_and_comes_back(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "FILE_BYTES_MAX", 3 << 20)
    content = bytes(range(256)) * (10 << 10)  # in several parts, no text
    async with clients(FakeService(saying("a")), database) as (client,):
        file = await client.files.create(
            file=("a b\x00/ü.bin", BytesIO(content)),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.bytes, file.expires_at - file.created_at) == (len(content), 3600)
        assert (await client.files.content(file.id)).content == content
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=BytesIO(b"a" * (3 << 20 | 1)), purpose="batch")
        assert refused.value.status_code == 413
        for wrong in ({"purpose": "vision"}, {"purpose": "batch", "expires_after": {"seconds": 5}}):
            with pytest.raises(openai.BadRequestError):
                await client.files.create(file=BytesIO(b"a"), **wrong)
        with pytest.raises(openai.BadRequestError, match="purpose of this file"):
            await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for wrong in (
            {"endpoint": "/v1/moderations"},
            {"completion_window": "soon"},
            {"completion_window": "9d"},
        ):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.batches.create(**{**batch, **wrong})
        assert [each.id async for each in await client.files.list(limit=1, order="asc")] == [file.id]
        await client.files.delete(file.id)
        url = f"{client.base_url}files"
        async with httpx.AsyncClient() as plain:
            for kind, body in (
                ("application/json", b"{}"),
                ("multipart/form-data", b"{}"),
                (FORM, b"--x\r\n\r\n\r\n--x--\r\n"),
                (FORM, b"--x\r\n" + b"a" * 9000),
                (FORM, PART + b"cut"),
                (FORM, (PART + b"a\r\n") * 2 + b"--x--"),
            ):
                reply = await plain.post(url, headers={"content-type": kind}, content=body)
                assert reply.status_code in {400, 415}, reply.text

            async def padded() -> AsyncGenerator[bytes]:
                yield b"--x--"
                for _ in range(6):
                    yield bytes(PART_BYTES)

            reply = await plain.post(url, headers={"content-type": FORM}, content=padded())
            assert reply.status_code == 413, reply.text


async def test_uploads_that_are_slow_or_given_up_leave_nothing(tmp_path: Path) -> None:
    database = database_settings(str(tmp_path / "stored.db"), TTL_S)
    limits = EdgeLimits(body_s_max=0.2, body_bytes_max=4 * UPLOAD_BYTES)
    edge = edge_over(FakeService(saying("a")), database, limits=limits)
    headers = {"content-type": FORM}

    async def body(pause: Callable[[], Awaitable[object]]) -> AsyncGenerator[bytes]:
        yield PART
        yield bytes(PART_BYTES)
        await pause()
        yield b"\r\n--x--"

    async with clients_of(edge) as (client,), httpx.AsyncClient() as plain:
        url = f"{client.base_url}files"
        slow = await plain.post(url, headers=headers, content=body(lambda: asyncio.sleep(0.5)))
        assert (slow.status_code, slow.json()["error"]["code"]) == (408, "body_too_slow")
        object.__setattr__(limits, "body_s_max", 60.0)
        never = asyncio.Event()
        held = [
            asyncio.create_task(plain.post(url, headers=headers, content=body(never.wait))) for _ in range(2)
        ]
        await until_rows(database, 2)
        purpose = PART.replace(b"file", b"purpose") + b"batch\r\n"
        whole: dict[str, Any] = {"headers": headers, "content": purpose + PART + b"\r\n--x--"}
        assert (await plain.post(url, **whole)).status_code == 429, "a client has half of what is free"
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until_rows(database, 0)
        assert (await plain.post(url, **whole)).status_code == 200


async def test_lists_are_read_by_the_page(database: DatabaseSettings) -> None:
    async with clients(FakeService(saying("a")), database) as (client,):
        names: list[str] = []
        for purpose in ("batch", "user_data", "batch", "batch"):
            file = await client.files.create(file=("a", BytesIO(b"{}")), purpose=purpose)
            names.append(file.id)
        batches = [
            await client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
            for name in (names[0], names[2], names[3])
        ]
        up = [each.id async for each in await client.files.list(order="asc", limit=1)]
        down = [each.id async for each in await client.files.list(limit=3)]
        assert (sorted(up), up) == (sorted(names), down[::-1])
        some = [each.id async for each in await client.files.list(purpose="batch", limit=1)]
        assert some == [name for name in down if name != names[1]]
        paged = [each.id async for each in await client.batches.list(limit=2)]
        assert sorted(paged) == sorted(batch.id for batch in batches)
        page = await client.files.list(after=down[1], limit=1)
        assert ([each.id for each in page.data], page.has_more) == ([down[2]], True)
        for wrong in (client.files.list(after="file-x"), client.batches.list(after="batch_x")):
            with pytest.raises(openai.NotFoundError, match=r"[-_]x"):
                await wrong
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.list(purpose="a\x00")


async def until_rows(database: DatabaseSettings, count: int) -> None:
    """Wait until there are this many files and parts of files."""
    while sum(await rows_of(database, "files", "parts")) != count:  # noqa: ASYNC110 - a database
        await asyncio.sleep(POLL_S)


@given(
    st.lists(st.tuples(st.sampled_from(["file", "purpose"]), st.binary(max_size=90)), min_size=1, max_size=4),
    st.lists(st.integers(1, 30)),
)
def test_form_is_read_whatever_the_pieces(parts: list[tuple[str, bytes]], cuts: list[int]) -> None:
    boundary = b"boundary-of-a-form"
    body = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"; filename="a"\r\n\r\n%b\r\n'
        % (boundary, name.encode(), data)
        for name, data in parts
    )
    reader = MultipartReader(f'multipart/form-data; boundary="{boundary.decode()}"')
    found: list[tuple[Any, bytes]] = []
    for piece in pieces(b"preamble\r\n" + body + b"--" + boundary + b"--\r\n", cuts):
        for part, data in reader.feed(piece):
            if found and found[-1][0] is part:
                found[-1] = (part, found[-1][1] + data)
            else:
                found.append((part, data))
    assert list(reader.feed(bytes(1000))) == []
    assert reader.has_ended
    whole = [(part.name, data) for part, data in found]
    assert whole == parts


def test_form_without_its_boundary_is_refused() -> None:
    for wrong in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with pytest.raises(RequestError, match="send a form"):
            MultipartReader(wrong)
