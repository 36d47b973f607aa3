"""Objects in a real Mooncake whose master or owner crashes, stops, loses or damages them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.kvstore.objects import page, random_body
from tests.support.mooncake import TRANSPORT, Mooncake, PlainClient, end, eventually, frozen, mooncake
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.mooncake_store import open_mooncake
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.kvstore.stores.remote_store import RemoteStore
from tidemill.kvstore.stores.seal import SEAL_BYTES

pytestmark = pytest.mark.slow

BODY_BYTES = 100_000
LEASE_S = 0.3
FLAGS = (
    f"--default_kv_lease_ttl={round(LEASE_S * 1000)}ms",
    "--client_ttl=2",
    "--put_start_discard_timeout_sec=1",
)


def offers(*numbers: int, num_bytes: int = BODY_BYTES) -> list[tuple[ObjectKey, memoryview]]:
    return [(page(number), memoryview(random_body(number, num_bytes))) for number in numbers]


async def fetch(store: RemoteStore, *numbers: int) -> list[Got]:
    """Return the outcomes, and assert that hits are right."""
    views = [(page(number), memoryview(bytearray(BODY_BYTES))) for number in numbers]
    outcomes = await store.get(views)
    for number, (_, view), got in zip(numbers, views, outcomes, strict=True):
        assert got is not Got.HIT or view == offers(number)[0][1]
    return outcomes


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - other processes send no events
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Mooncake]:
    with mooncake(tmp_path_factory.mktemp("mooncake") / "log", flags=FLAGS) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Mooncake) -> Generator[PlainClient]:
    client = PlainClient(service)
    yield client
    client.close()


@pytest.fixture
def plain(client: PlainClient) -> PlainClient:
    """Return a client of an empty store."""
    client.clear()
    return client


@asynccontextmanager
async def open_client(service: Mooncake) -> AsyncGenerator[RemoteStore]:
    store = open_mooncake(service.address, transport=TRANSPORT, admin=service.admin)
    try:
        yield store
    finally:
        await store.close()
        await store.close()


@pytest.mark.usefixtures("plain")
async def test_mooncake_finds_a_flipped_bit_in_the_memory_of_an_owner(service: Mooncake) -> None:
    async with open_client(service) as store:
        await store.put(offers(1, 2, 3))
        service.flip(str(page(1)), SEAL_BYTES + 77_777)
        service.flip(str(page(3)), SEAL_BYTES - 1)
        assert await fetch(store, 1, 2, 3) == [Got.CORRUPT, Got.HIT, Got.CORRUPT]
        assert await fetch(store, 1, 2, 3) == [Got.MISS, Got.HIT, Got.MISS]


async def test_mooncake_does_not_report_the_name_of_a_crashed_writer_as_stored(
    service: Mooncake, plain: PlainClient
) -> None:
    """Mooncake returns 0 to other writers of that name, and stores nothing."""
    async with open_client(service) as store:
        plain.native.batch_put_session_start([str(page(2))], [BODY_BYTES + SEAL_BYTES])
        assert await store.put(offers(1, 2, 3)) == [Put.STORED, Put.UNCONFIRMED, Put.SKIPPED]
        assert await store.contains([page(1), page(2)]) == [True, False]
        assert await fetch(store, 1, 2) == [Got.HIT, Got.MISS]

        async def is_stored() -> bool:
            [outcome] = await store.put(offers(2))
            assert outcome in {Put.STORED, Put.UNCONFIRMED}
            return outcome is Put.STORED

        await until(is_stored)
        assert await fetch(store, 2) == [Got.HIT]


@pytest.mark.usefixtures("plain")
async def test_mooncake_reports_bytes_that_arrive_after_their_lease(service: Mooncake) -> None:
    async with open_client(service) as store:
        await store.put(offers(1))
        with frozen(service.owners[-1]):
            late = asyncio.ensure_future(fetch(store, 1))
            await asyncio.sleep(3 * LEASE_S)  # until the lease has expired
            assert not late.done()
        assert await late == [Got.EXPIRED]
        assert await fetch(store, 1) == [Got.HIT]


@pytest.mark.usefixtures("plain")
async def test_mooncake_reports_a_stopped_owner_and_cancels_with_the_transfer(
    service: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        monkeypatch.setenv(limit, "1")
    async with open_client(service) as store:
        await store.put(offers(1))
        views = [(page(1), memoryview(bytearray(BODY_BYTES)))]
        with frozen(service.owners[-1]):
            cancelled = asyncio.ensure_future(store.get(views))
            waiting = [asyncio.ensure_future(fetch(store, 1)), asyncio.ensure_future(store.put(offers(2)))]
            await asyncio.sleep(LEASE_S)
            cancelled.cancel()
            assert await store.contains([page(1)]) == [True], "a query waited for transfers"
            assert not cancelled.done()
            assert await asyncio.gather(*waiting) == [[Got.OWNER_DOWN], [Put.OWNER_DOWN]]
            await asyncio.wait({cancelled})
            assert cancelled.cancelled()
            views[0][1][:] = bytes(BODY_BYTES)
        assert not any(views[0][1]), "a late transfer wrote"

        async def is_back() -> bool:  # the master may have declared the owner dead
            return (await store.put(offers(3)))[0].is_there

        await until(is_back)


@pytest.mark.usefixtures("plain")
async def test_mooncake_reports_a_crashed_owner_and_uses_its_successor(service: Mooncake) -> None:
    async with open_client(service) as store:
        await store.put(offers(1))
        end(service.owners.pop())
        assert await fetch(store, 1) == [Got.OWNER_DOWN]
        assert await store.put(offers(2)) == [Put.OWNER_DOWN]

        async def is_forgotten() -> bool:
            return await fetch(store, 1) == [Got.MISS]

        await until(is_forgotten)
        assert await store.put(offers(2)) == [Put.FULL], "an owner lends memory"
        service.start_owner()
        assert await store.put(offers(1, 2)) == [Put.STORED] * 2
        assert await fetch(store, 1, 2) == [Got.HIT] * 2


@pytest.mark.usefixtures("plain")
async def test_mooncake_reports_a_stopped_master_and_continues_with_it(service: Mooncake) -> None:
    async with open_client(service) as store:
        await store.put(offers(1))
        with frozen(service.master):
            asked = (fetch(store, 1), store.put(offers(2)))
            assert await asyncio.gather(*asked) == [[Got.UNREACHABLE], [Put.UNREACHABLE]]

        async def is_back() -> bool:
            return (await store.put(offers(2)))[0].is_there

        await until(is_back)


@pytest.mark.usefixtures("plain")
async def test_mooncake_reports_a_killed_master_and_reconnects_to_a_new_one(service: Mooncake) -> None:
    async with open_client(service) as store:
        await store.put(offers(1))
        end(service.master)
        assert await fetch(store, 1) == [Got.UNREACHABLE]
        assert await store.put(offers(2)) == [Put.UNREACHABLE]  # after 4.3 s
        service.start_master()

        async def is_back() -> bool:
            [outcome] = await store.put(offers(2))
            return outcome.is_there

        await until(is_back)
        assert await fetch(store, 1, 2) == [Got.MISS, Got.HIT], "a new master has old objects"


async def test_mooncake_reports_only_existing_objects_when_full(tmp_path: Path) -> None:
    """Its eviction is asynchronous and by lease, so the test does not expect certain objects."""
    num_bytes = 1 << 20
    with mooncake(tmp_path / "log", 16 << 20, FLAGS) as service:
        async with open_client(service) as store:
            seen: set[Put] = set()
            for start in range(0, 40, 4):
                outcomes = await store.put(offers(*range(start, start + 4), num_bytes=num_bytes))
                there = [outcome.is_there for outcome in outcomes]
                assert there == sorted(there, reverse=True)
                claimed = [page(start + index) for index in range(there.count(True))]
                assert await store.contains(claimed) == [True] * len(claimed)
                views = [(key, memoryview(bytearray(num_bytes))) for key in claimed]
                assert await store.get(views) == [Got.HIT] * len(claimed)
                seen.update(outcomes)
            assert {Put.STORED, Put.FULL} <= seen <= {Put.STORED, Put.FULL, Put.UNCONFIRMED, Put.SKIPPED}
            assert await store.put(offers(99, num_bytes=20 << 20)) == [Put.FULL], (
                "the object is larger than all lent memory"
            )

            async def finds_space() -> bool:
                return await store.put(offers(100, num_bytes=num_bytes)) == [Put.STORED]

            await until(finds_space)
            await store.list_objects()
            assert 0 < store.stats().bytes <= store.stats().capacity_bytes == 16 << 20
        eventually(lambda: "master_soft_pin_key_count 0" not in service.ask("/metrics"))
