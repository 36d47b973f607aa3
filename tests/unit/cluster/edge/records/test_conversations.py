"""Stored responses and conversations with the `openai` SDK over a real socket, in SQLite and in Postgres."""

import asyncio
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tests.support.cluster.postgres import BINARIES, MISSING, running_postgres
from tests.support.cluster.stored import NOW_S, TTL_S, Write, clients, rows_of
from tests.unit.cluster.edge.http.test_responses import ALL, LOOK, THINKS
from tests.unit.cluster.edge.http.test_tools import prompts_of
from tidemill.cluster.edge.apis import responses_storage
from tidemill.cluster.edge.records import database as database_module
from tidemill.cluster.edge.records.conversations import (
    StoredContext,
    StoredResponse,
    TenantConversations,
)
from tidemill.cluster.edge.records.database import Database, DatabaseSettings, Transaction, database_settings
from tidemill.cluster.edge.records.store import GRACE_S, Records
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError, Unserved

TENANT = "tenant:mine"
LATER = StoredResponse(id="resp_later", body="{}", inputs=[("msg_1", "{}")], outputs=[("msg_2", "{}")])
TABLES = ("conversations", "items", "responses")


def texts_of(items: Any) -> list[str]:  # noqa: ANN401 - of the SDK
    """The texts of messages, and the types of other items."""
    return [item.content[0].text if item.type == "message" else item.type for item in items]


async def test_chain_has_the_prompt_of_a_clients_own_replay(database: DatabaseSettings) -> None:
    """The chain has reasoning, words and calls, an answer to a call, and marks for the cache."""
    service = FakeService(saying(ALL))
    marked = {"type": "input_text", "text": "Where is Emma?", "cache_control": {"type": "ephemeral"}}
    first: list[Any] = [{"role": "developer", "content": "Look."}, {"role": "user", "content": [marked]}]
    async with clients(service, database) as (client,):
        ask: dict[str, Any] = {"tools": [LOOK], "extra_body": THINKS}
        one = await client.responses.create(input=first, **ask)
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "in the tower"}
            for item in one.output
            if item.type == "function_call"
        ]
        two = await client.responses.create(input=outputs, previous_response_id=one.id, **ask)
        three = await client.responses.create(
            input="And Tom?", instructions="Be short.", previous_response_id=two.id, **ask
        )
        replay = [*first, *(item.model_dump() for item in one.output), *outputs]
        await client.responses.create(input=replay, store=False, **ask)
        replay += [*(item.model_dump() for item in two.output), {"role": "user", "content": "And Tom?"}]
        await client.responses.create(input=replay, instructions="Be short.", store=False, **ask)
        found = await client.responses.retrieve(three.id)
        assert found.to_dict() == three.to_dict()
        assert (found.previous_response_id, found.store) == (two.id, True)
    _, second, third, own_second, own_third = service.requests
    assert second.tokens == own_second.tokens
    assert third.tokens == own_third.tokens
    assert second.breakpoints == own_second.breakpoints
    assert "in the tower" in prompts_of(service)[1]


async def test_input_items_are_all_that_a_response_has_seen(database: DatabaseSettings) -> None:
    service = FakeService(saying("here"))
    async with clients(service, database) as (client,):
        one = await client.responses.create(input="a")
        two = await client.responses.create(input="b", previous_response_id=one.id)
        items = client.responses.input_items
        newest = [item async for item in await items.list(two.id)]
        oldest = [item async for item in await items.list(two.id, order="asc", limit=1)]
        assert texts_of(newest) == ["b", "here", "a"]
        assert newest == oldest[::-1]
        assert [item.role for item in newest] == ["user", "assistant", "user"]
        assert len({item.id for item in newest}) == 3
        page = await items.list(two.id, after=newest[0].id, limit=1)
        assert (texts_of(page.data), page.has_more, page.first_id) == (["here"], True, newest[1].id)
        assert texts_of((await items.list(one.id)).data) == ["a"]
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError):
                await items.list(one.id, **wrong)
        with pytest.raises(openai.NotFoundError, match="msg_x"):
            await items.list(one.id, after="msg_x")


async def test_answers_to_one_response_are_chains_of_their_own(database: DatabaseSettings) -> None:
    """Concurrent ones, on two edges, and one that comes after the chain has gone on."""
    service = FakeService(saying("here"))
    async with clients(service, database, database) as edges:
        one = await edges[0].responses.create(input="a")
        answers = await asyncio.gather(
            *(
                edges[index % 2].responses.create(input=f"b{index}", previous_response_id=one.id)
                for index in range(6)
            )
        )
        for index, answer in enumerate(answers):
            last = await edges[0].responses.create(input="c", previous_response_id=answer.id)
            listed = (await edges[1].responses.input_items.list(last.id)).data
            assert texts_of(listed) == ["c", "here", f"b{index}", "here", "a"]


async def test_deleted_response_is_gone_and_its_items_go_with_the_chain(database: DatabaseSettings) -> None:
    service = FakeService(saying("here"))
    async with clients(service, database) as (client,):
        before = await rows_of(database, *TABLES)
        one = await client.responses.create(input="a")
        two = await client.responses.create(input="b", previous_response_id=one.id)
        await client.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError, match=one.id):
            await client.responses.retrieve(one.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input="b", previous_response_id=one.id)
        assert refused.value.code == "previous_response_not_found"
        listed = (await client.responses.input_items.list(two.id)).data
        assert texts_of(listed) == ["b", "here", "a"]
        await client.responses.delete(two.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(two.id)
        assert await rows_of(database, *TABLES) == before


async def test_answer_keeps_what_was_deleted_while_it_came(database: DatabaseSettings) -> None:
    sent = {name: f'{{"id":"{name}"}}' for name in ("msg_0", "msg_1", "msg_2")}
    first = StoredResponse(id="resp_1", body="{}", inputs=[*sent.items()][:1], outputs=[*sent.items()][1:2])
    records = Records(Database(database), TTL_S, lambda: NOW_S)
    write: Write[TenantConversations] = partial(records.write, TENANT, TenantConversations)
    await write(lambda own: own.keep(StoredContext(), first))
    context = await write(lambda own: own.context("resp_1", None, 9))
    await write(lambda own: own.delete_response("resp_1"))
    answer = StoredResponse(id="resp_2", body="{}", inputs=[*sent.items()][2:], outputs=[])
    await write(lambda own: own.keep(context, answer))
    assert (await write(lambda own: own.context("resp_2", None, 9))).items == [*sent.values()]
    records.close()


async def test_store_false_keeps_nothing(database: DatabaseSettings) -> None:
    async with clients(FakeService(saying("here")), database) as (client,):
        one = await client.responses.create(input="a")
        before = await rows_of(database, *TABLES)
        two = await client.responses.create(input="b", previous_response_id=one.id, store=False)
        assert (two.store, await rows_of(database, *TABLES)) == (False, before)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(two.id)


async def test_conversation_grows_by_responses_and_by_hand(database: DatabaseSettings) -> None:
    service = FakeService(saying("here"))
    asked: Any = {"type": "message", "role": "user", "content": "a"}
    async with clients(service, database) as (client,):
        made = await client.conversations.create(items=[asked], metadata={"topic": "x"})
        assert (made.object, made.metadata) == ("conversation", {"topic": "x"})
        assert (await client.conversations.retrieve(made.id)) == made
        updated = await client.conversations.update(made.id, metadata={"topic": "y"})
        assert updated.metadata == {"topic": "y"}
        reply = await client.responses.create(input="b", conversation=made.id)
        assert reply.conversation.id == made.id
        async with client.responses.stream(
            model="keeper", input="c", conversation={"id": made.id}, store=False
        ) as stream:
            async for _ in stream:
                pass
        added = await client.conversations.items.create(made.id, items=[{**asked, "content": "d"}])
        assert texts_of(added.data) == ["d"]
        items = [item async for item in await client.conversations.items.list(made.id, order="asc", limit=2)]
        assert texts_of(items) == ["a", "b", "here", "c", "here", "d"]
        assert "a<|end|>\n<|user|> b" in prompts_of(service)[0]
        first = await client.conversations.items.retrieve(items[0].id, conversation_id=made.id)
        assert first == items[0]
        assert (await client.conversations.items.delete(items[0].id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve(items[0].id, conversation_id=made.id)
        branch = await client.responses.create(input="e", previous_response_id=reply.id)
        assert texts_of((await client.responses.input_items.list(branch.id)).data) == ["e", "here", "b"]
        assert len((await client.conversations.items.list(made.id)).data) == 5, "a chain has left it"
        assert (await client.conversations.delete(made.id)).deleted
        for gone in (client.conversations.retrieve(made.id), client.responses.retrieve(reply.id)):
            with pytest.raises(openai.NotFoundError):
                await gone
        with pytest.raises(openai.NotFoundError, match=made.id):
            await client.responses.create(input="b", conversation=made.id)
        empty = await client.conversations.create()
        listed = await client.conversations.items.list(empty.id)
        assert (listed.data, listed.has_more) == ([], False)
        with pytest.raises(openai.BadRequestError, match="leave out previous_response_id"):
            await client.responses.create(input="b", conversation=empty.id, previous_response_id=branch.id)


async def test_items_with_one_id_are_stored_with_several_and_each_page_goes_on(
    database: DatabaseSettings,
) -> None:
    asked: Any = {"type": "message", "role": "user", "id": "msg_same"}
    async with clients(FakeService(saying("here")), database) as (client,):
        made = await client.conversations.create(items=[{**asked, "content": text} for text in "ab"])
        added = await client.conversations.items.create(made.id, items=[{**asked, "content": "c"}] * 2)
        again: list[Any] = [{**asked, "content": "d"}] * 2
        await client.responses.create(input=again, conversation=made.id)
        listed = client.conversations.items.list
        async with asyncio.timeout(10):
            up = [item async for item in await listed(made.id, order="asc", limit=1)]
            down = [item async for item in await listed(made.id, limit=1)]
        assert texts_of(up) == ["a", "b", "c", "c", "d", "d", "here"]
        assert down == up[::-1]
        assert len({item.id for item in up}) == 7
        assert up[0].id == "msg_same"
        assert [item.id for item in added.data] == [item.id for item in up[2:4]]
        one = await client.responses.create(input=again)
        two = await client.responses.create(input=again, previous_response_id=one.id)
        async with asyncio.timeout(10):
            seen = [item async for item in await client.responses.input_items.list(two.id, limit=1)]
        assert texts_of(seen) == ["d", "d", "here", "d", "d"]
        assert len({item.id for item in seen}) == 5


async def test_reference_stands_for_a_stored_item(database: DatabaseSettings) -> None:
    service = FakeService(saying("here"))
    async with clients(service, database) as (client,):
        one = await client.responses.create(input="a")
        reference: Any = {"type": "item_reference", "id": one.output[0].id}
        two = await client.responses.create(input=[reference, {"role": "user", "content": "b"}])
        assert texts_of((await client.responses.input_items.list(two.id)).data) == ["b", "here"]
        for wrong in ("msg_x", "a\x00b", "", "a" * 200):
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(input=[{**reference, "id": wrong}])
    assert "<|assistant|> here<|end|>\n<|user|> b" in prompts_of(service)[1]


async def test_other_tenants_find_nothing(database: DatabaseSettings) -> None:
    service = FakeService(saying("here"))
    async with clients(service, database, keys=("mine", "yours")) as (mine, yours):
        reply = await mine.responses.create(input="a")
        made = await mine.conversations.create(items=[{"role": "user", "content": "a"}])
        (item,) = (await mine.conversations.items.list(made.id)).data
        own = await yours.conversations.create(items=[{"role": "user", "content": "a"}])
        reference: Any = {"type": "item_reference", "id": reply.output[0].id}
        attempts = [
            yours.responses.retrieve(reply.id),
            yours.responses.delete(reply.id),
            yours.responses.input_items.list(reply.id),
            yours.responses.create(input="b", conversation=made.id),
            yours.responses.create(input=[reference]),
            yours.conversations.retrieve(made.id),
            yours.conversations.update(made.id, metadata={}),
            yours.conversations.delete(made.id),
            yours.conversations.items.list(made.id),
            yours.conversations.items.create(made.id, items=[{"role": "user", "content": "b"}]),
            yours.conversations.items.retrieve(item.id, conversation_id=made.id),
            yours.conversations.items.delete(item.id, conversation_id=made.id),
            yours.conversations.items.list(own.id, after=item.id),
            yours.conversations.items.retrieve(item.id, conversation_id=own.id),
            yours.conversations.items.delete(item.id, conversation_id=own.id),
        ]
        answers = await asyncio.gather(*attempts, return_exceptions=True)
        assert {type(answer) for answer in answers} == {openai.NotFoundError}
        with pytest.raises(openai.BadRequestError, match=reply.id):
            await yours.responses.create(input="b", previous_response_id=reply.id)
        assert (await mine.responses.retrieve(reply.id)).id == reply.id
        assert len((await mine.conversations.items.list(made.id)).data) == 1
        same = {"type": "message", "role": "user", "content": "a", "id": item.id}
        added = await yours.conversations.items.create(own.id, items=[same])
        assert added.data[0].id == item.id, "names of tenants are their own"


async def test_conversation_expires_some_time_after_its_last_response(database: DatabaseSettings) -> None:
    now_s = [0.0]  # before the end of all that other tests have stored
    own = Records(Database(database), TTL_S, lambda: now_s[0])
    before = await rows_of(database, *TABLES)
    service = FakeService(saying("here"))
    async with clients(service, database, keys=("mine",)) as (client,):  # whose clock stands still
        one = await client.responses.create(input="a")
        now_s[0] = NOW_S + TTL_S - 1
        await own.write(
            TENANT, TenantConversations, lambda found: found.keep(found.context(one.id, None, 9), LATER)
        )
        now_s[0] = NOW_S + TTL_S + 1 + GRACE_S
        await own.expire()
        now_s[0] -= GRACE_S
        assert await own.read(TENANT, TenantConversations, lambda found: found.response(one.id)), (
            "a later response continues it"
        )
        now_s[0] += TTL_S - 2
        with pytest.raises(RequestError, match="expired"):
            await own.read(TENANT, TenantConversations, lambda found: found.response(one.id))
        now_s[0] += GRACE_S
        await own.expire()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(one.id)
    own.close()
    assert await rows_of(database, *TABLES) <= before


@pytest.mark.parametrize("stream", [False, True])
def test_without_database_nothing_is_stored_and_clients_are_served(*, stream: bool) -> None:
    app = app_over(FakeService(saying("here")))
    for store, ignored in ((None, None), (False, None), (True, "store")):
        body = {"input": "a", "stream": stream} | ({} if store is None else {"store": store})
        reply = call(app, "POST", "/v1/responses", json=body)
        assert reply.status_code == 200
        assert '"store":false' in reply.text
        assert reply.headers.get("x-tidemill-ignored") == ignored
    reference = {"type": "item_reference", "id": "msg_1"}
    for field in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"input": [reference]}):
        reply = call(app, "POST", "/v1/responses", json={"input": "a", "stream": stream, **field})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(field)))
        assert "--database" in reply.json()["error"]["message"]
    for path in ("/v1/responses/resp_1", "/v1/conversations/conv_1"):
        reply = call(app, "GET", path)
        assert reply.status_code == 404
        assert "--database" in reply.json()["error"]["message"]


async def test_what_is_too_much_is_refused(
    database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeService(saying("here"))
    asked: Any = {"type": "message", "role": "user", "content": "a"}
    async with clients(service, database) as (client,):
        many = await client.conversations.create(items=[asked] * 20)
        with pytest.raises(openai.BadRequestError, match="items"):
            await client.conversations.create(items=[asked] * 21)
        monkeypatch.setattr(responses_storage, "MESSAGES_MAX", 20)
        with pytest.raises(openai.BadRequestError, match="more than 19 items"):
            await client.responses.create(input="b", conversation=many.id)
        monkeypatch.setattr(responses_storage, "MESSAGES_MAX", 21)
        await client.responses.create(input="b", conversation=many.id, store=False)
        monkeypatch.setattr(responses_storage, "MESSAGES_MAX", 99)
        monkeypatch.setattr(responses_storage, "CONTEXT_BYTES_MAX", 2000)
        with pytest.raises(openai.BadRequestError, match="stored: start another"):
            await client.responses.create(input="b", conversation=many.id)
        with pytest.raises(openai.BadRequestError, match="start another"):
            await client.conversations.items.create(many.id, items=[asked])
        assert len((await client.conversations.items.list(many.id, limit=100)).data) == 22
        for metadata in ({"a" * 65: "b"}, {"a": "b" * 513}, {str(number): "" for number in range(17)}):
            with pytest.raises(openai.BadRequestError, match="metadata"):
                await client.conversations.create(metadata=metadata)
        for wrong in ("a b", "a\x00", "a" * 129):
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(input="b", previous_response_id=wrong)
            with pytest.raises(openai.BadRequestError):
                await client.responses.retrieve(wrong)


async def test_lost_connection_to_postgres_is_no_error() -> None:
    if BINARIES is None:
        pytest.skip(MISSING)
    with running_postgres() as postgres:
        async with clients(FakeService(saying("here")), database_settings(postgres.url, TTL_S)) as (client,):
            kept = await client.responses.create(input="a")
            postgres.stop()
            postgres.start()
            assert (await client.responses.retrieve(kept.id)).id == kept.id


async def test_slow_database_is_503_and_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Database(database_settings(str(tmp_path / "stored.db"), TTL_S))
    await own.read(lambda _: None)
    monkeypatch.setattr(database_module, "ANSWER_S_MAX", 0.05)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    with pytest.raises(Unserved, match="has not answered for"):
        await own.read(lambda _: asyncio.run_coroutine_threadsafe(ended.wait(), loop).result())
    ended.set()
    own.close()


async def test_files_are_private_and_tables_are_made_once(tmp_path: Path) -> None:
    settings = database_settings(f"sqlite:///{tmp_path}/stored.db", TTL_S)
    several = [Database(settings) for _ in range(8)]
    ids = count()

    async def write(own: Database) -> None:
        await own.write(
            lambda sent: sent.run(
                "INSERT INTO tidemill_conversations VALUES (?, '', 1, 0, 0, 0, '{}', 0)", str(next(ids))
            )
        )

    await asyncio.gather(*map(write, several))
    assert await rows_of(settings, *TABLES) == [8, 0, 0]
    assert (tmp_path / "stored.db").stat().st_mode & 0o777 == 0o600
    for own in several:
        own.close()


async def test_edge_that_starts_does_not_wait_for_one_that_writes(database: DatabaseSettings) -> None:
    """Each would hold what the other waits for: Postgres ends one of the two."""
    first, second = Database(database), Database(database)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def insert(sent: Transaction) -> None:
        sent.run("INSERT INTO tidemill_conversations VALUES ('a', '', 1, 0, 0, 0, '{}', 0)")
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(ended.wait(), loop).result()
        sent.run("DELETE FROM tidemill_conversations")

    await first.read(lambda _: None)
    begun = asyncio.Event()
    writing = asyncio.create_task(first.write(insert))
    await begun.wait()
    assert await second.read(lambda sent: sent.rows("SELECT * FROM tidemill_conversations")) == []
    ended.set()
    await writing
    for own in (first, second):
        own.close()


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("redis://host", "there is no 'redis': give a path"),
        ("missing/stored.db", "make "),
        ("sqlite:///", "is no file"),
    ],
)
def test_wrong_address_is_refused_with_its_fix(url: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TidemillError, match=f"^--database: .*{fix}"):
        database_settings(url, TTL_S)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(TidemillError, match=r"tidemill\[postgres\]"):
        database_settings("postgresql://host/name", TTL_S)
