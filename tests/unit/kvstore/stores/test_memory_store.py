"""The memory store evicts in the exact order of use."""

import asyncio

from tests.support.kvstore.objects import page
from tests.support.kvstore.store_process import body
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got
from tidemill.kvstore.stores.seal import SEAL_BYTES

BODY_BYTES = 100


def test_memory_store_counts_a_read_as_a_use() -> None:
    store = MemoryStore(3 * (BODY_BYTES + SEAL_BYTES))

    async def scenario() -> list[bool]:
        for number in (1, 2, 3):
            await store.put([(page(number), memoryview(body(number, 1, BODY_BYTES)))])
        assert await store.get([(page(1), memoryview(bytearray(BODY_BYTES)))]) == [Got.HIT]
        await store.put([(page(4), memoryview(body(4, 1, BODY_BYTES)))])
        return await store.contains([page(number) for number in (1, 2, 3, 4)])

    assert asyncio.run(scenario()) == [True, False, True, True]
