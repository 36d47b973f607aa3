"""The 18 failures of the real store: the fake fails in the same way, after the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import TypedDict, Unpack

import pytest

from tests.support.sim.fake_mooncake import FakeClient, FakeMooncake
from tests.support.sim.loop import simulate

ROOT = Path(__file__).parents[2]
SIZE = 1000
BODIES = [Random(number).randbytes(SIZE) for number in range(100)]

Scenario = Callable[[FakeMooncake, FakeClient], Awaitable[None]]


class Options(TypedDict, total=False):
    owners: int
    capacity_bytes: int
    bytes_per_s: float
    ghosts: float
    late_writes: bool


def play(scenario: Scenario, **options: Unpack[Options]) -> None:
    async def main() -> None:
        cluster = FakeMooncake(Random(1), **options)
        client = cluster.client()
        await scenario(cluster, client)
        await client.close()

    simulate(1, main())


async def put(client: FakeClient, number: int, body: int | None = None) -> int:
    stored = BODIES[number if body is None else body]
    [code] = await client.put([str(number)], [(memoryview(stored),)])
    return code


async def get(client: FakeClient, number: int) -> bytes | int:
    memory = bytearray(SIZE)
    [code] = await client.get([str(number)], [(memoryview(memory)[:10], memoryview(memory)[10:])])
    return bytes(memory) if code == SIZE else code


async def exist(client: FakeClient, number: int) -> int:
    [code] = await client.exist([str(number)])
    return code


async def took_s(call: Awaitable[object]) -> float:
    started = asyncio.get_running_loop().time()
    await call
    return asyncio.get_running_loop().time() - started


def test_fake_mooncake_keeps_objects_without_faults() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        names = [str(number) for number in range(5)]
        assert await client.put(names, [(memoryview(BODIES[number]),) for number in range(5)]) == [0] * 5
        assert [await get(client, number) for number in range(5)] == BODIES[:5]
        assert await client.exist([*names, "9"]) == [1] * 5 + [0]
        assert await client.remove(["1", "9"]) == [0, -704]
        assert await get(client, 1) == -704

    play(scenario)


def test_f1_put_succeeds_and_keeps_the_value_of_another_writer() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        other = cluster.client()
        assert await asyncio.gather(*(put(client, 1, body) for body in (2, 3)), put(other, 1, 4)) == [0] * 3
        kept = await get(client, 1)
        assert kept in BODIES[2:5]
        assert await put(other, 1, 9) == 0
        assert await get(other, 1) == kept

    play(scenario)


def test_f2_name_of_a_crashed_writer_is_blocked_for_half_a_minute() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        cluster.master.begin_put("1", SIZE)
        for _ in range(3):
            assert await put(client, 1) == 0
            assert await exist(client, 1) == 0
            assert await get(client, 1) == -704
            await asyncio.sleep(10)
        await asyncio.sleep(1)
        assert await put(client, 1) == 0
        assert await get(client, 1) == BODIES[1]

    play(scenario)


def test_f2_blocked_names_occur_at_random() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        assert [await put(client, number) for number in range(100)] == [0] * 100
        assert 0 < sum([await exist(client, number) for number in range(100)]) < 100

    play(scenario, ghosts=0.5)


def test_f3_new_objects_are_evicted_before_objects_that_were_read() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        for number in range(8):
            assert await put(client, number) == 0
            await get(client, number)
        stored = [number for number in range(20, 40) if await put(client, number) == 0]
        await asyncio.sleep(1)
        assert stored
        lost = [number for number in stored if not await exist(client, number)]
        assert len(lost) > len(stored) / 2
        assert [await exist(client, number) for number in range(8)] == [1] * 8

    play(scenario, owners=1, capacity_bytes=10 * SIZE)


def test_f4_puts_fail_for_a_moment_although_all_objects_are_evictable() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        codes = [await put(client, number) for number in range(100)]
        assert set(codes) == {0, -200}
        await asyncio.sleep(1)
        assert await put(client, codes.index(-200)) == 0

    play(scenario, owners=1, capacity_bytes=10 * SIZE)


def test_f4_puts_fail_while_all_objects_are_leased() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        for number in range(10):
            await put(client, number)
            await get(client, number)
        for _second in range(4):
            assert await put(client, 50) == -200
            await asyncio.sleep(1)
        await asyncio.sleep(2)
        assert await put(client, 50) == 0

    play(scenario, owners=1, capacity_bytes=10 * SIZE)


def test_f5_half_of_all_puts_go_to_a_crashed_owner_until_it_is_forgotten() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        cluster.kill_owner(cluster.master.owners[0])
        numbers = count()
        codes = [await put(client, next(numbers)) for _ in range(8)]
        assert set(codes) == {0, -800}
        failed = codes.index(-800)
        assert await exist(client, failed) == 0, "a failed put does not block its name"
        seconds = [await took_s(put(client, next(numbers))) for _ in range(8)]
        assert max(seconds) == pytest.approx(1, abs=0.01)
        assert min(seconds) < 0.01
        await asyncio.sleep(10)
        assert [await put(client, next(numbers)) for _ in range(20)] == [0] * 20

    play(scenario)


def test_f6_objects_of_a_crashed_owner_exist_for_ten_seconds() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        cluster.kill_owner(cluster.master.owners[0])
        assert await exist(client, 1) == 1
        assert await get(client, 1) == -800
        assert await took_s(get(client, 1)) < 0.02
        await asyncio.sleep(10)
        assert await exist(client, 1) == 0
        assert await get(client, 1) == -704

    play(scenario, owners=1)


def test_f7_simple_get_returns_nothing_after_any_failure() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        assert await client.get_value("1") == b""
        await put(client, 1)
        assert await client.get_value("1") == BODIES[1]
        cluster.kill_owner(cluster.master.owners[0])
        assert await client.get_value("1") == b""
        cluster.kill_master()
        assert await client.get_value("1") == b""

    play(scenario, owners=1)


def test_f8_calls_take_4_s_without_master_and_30_s_with_a_frozen_process() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        cluster.kill_master()
        assert await took_s(get(client, 1)) < 0.001
        for call in (get(client, 1), put(client, 2), exist(client, 1)):
            assert await took_s(call) == pytest.approx(4.3)
        assert await get(client, 1) == await put(client, 1) == await exist(client, 1) == -900
        cluster.start_master(keeps=True)
        cluster.freeze_master()
        assert await took_s(get(client, 1)) == pytest.approx(30)
        cluster.thaw_master()
        assert await get(client, 1) == BODIES[1]
        cluster.freeze_owner(cluster.master.owners[0])
        call = asyncio.ensure_future(get(client, 1))
        assert await took_s(call) == pytest.approx(30, abs=0.01)
        assert call.result() == -800
        assert await put(client, 2) == -600, "no owner is left"

    play(scenario, owners=1)


def test_f8_call_resumes_with_the_frozen_owner() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        [owner] = cluster.master.owners
        for frozen_s, found in ((3, BODIES[1]), (12, -707)):
            cluster.freeze_owner(owner)
            call = asyncio.ensure_future(get(client, 1))
            await asyncio.sleep(frozen_s)
            cluster.thaw_owner(owner)
            assert await call == found
        assert await exist(client, 1) == 0
        await asyncio.sleep(1)
        assert await put(client, 1) == 0

    play(scenario, owners=1)


def test_f9_health_check_always_succeeds() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        cluster.kill_master()
        await get(client, 1)
        assert client.health_check() == 0

    play(scenario)


def test_f10_restarted_master_has_no_objects() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        cluster.kill_master()
        await asyncio.sleep(1)
        cluster.start_master()
        assert await put(client, 2) == -200, "the owners are not back"
        assert await get(client, 1) == -704
        await asyncio.sleep(1)
        assert await put(client, 2) == 0
        assert await get(client, 1) == -704

    play(scenario)


def test_f11_get_of_damaged_bytes_succeeds() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        cluster.corrupt("1")
        found = await get(client, 1)
        assert isinstance(found, bytes)
        assert (int.from_bytes(found) ^ int.from_bytes(BODIES[1])).bit_count() == 1

    play(scenario)


def test_f12_transfer_longer_than_its_lease_fails_at_its_end() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        for _again in range(2):
            assert await get(client, 1) == -707
            assert await took_s(get(client, 1)) == pytest.approx(10, abs=0.01)

    play(scenario, bytes_per_s=100)


def test_f13_leased_objects_are_removed_only_by_force() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        await get(client, 1)
        assert await client.remove(["1"], force=False) == [-706]
        assert await get(client, 1) == BODIES[1]
        assert await client.remove(["1"]) == [0]
        await put(client, 1)
        assert await client.remove(["1"], force=False) == [0]

    play(scenario)


def test_f14_impossible_objects_are_refused() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        assert await client.put(
            ["1", "2", ""], [(memoryview(bytes(size)),) for size in (0, 2 * SIZE, 1)]
        ) == [
            -600,
            -600,
            -600,
        ]
        assert await put(client, 1) == 0
        memory = memoryview(bytearray(SIZE + 1))
        assert await client.get(["1", "1"], [(memory[: SIZE - 1],), (memory,)]) == [-600, SIZE]
        assert memory[:SIZE] == BODIES[1]

    play(scenario, owners=2, capacity_bytes=int(1.5 * SIZE))


@pytest.mark.parametrize("late_writes", [False, True])
def test_f15_rdma_writes_late_to_memory_freed_under_a_call(*, late_writes: bool) -> None:
    memory = bytearray(SIZE)

    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        cluster.freeze_owner(cluster.master.owners[0])
        call = asyncio.ensure_future(client.get(["1"], [(memoryview(memory),)]))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.sleep(1)
        assert not call.done(), "a cancelled call ends when its memory is free"
        memory[:] = BODIES[2]
        await asyncio.wait({call})
        assert call.cancelled()
        assert (memory != BODIES[2]) == late_writes

    play(scenario, owners=1, late_writes=late_writes)


def test_put_reads_its_memory_until_it_has_ended() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        memory = bytearray(BODIES[1])
        call = asyncio.ensure_future(client.put(["1"], [(memoryview(memory),)]))
        await asyncio.sleep(0.5)
        memory[:] = bytes(SIZE)
        assert await call == [0]
        assert await get(client, 1) not in {BODIES[1], bytes(SIZE)}

    play(scenario, bytes_per_s=1000)


@pytest.mark.parametrize("keeps", [False, True])
def test_f16_failover_takes_ten_seconds_and_may_lose_all_objects(*, keeps: bool) -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        failover = asyncio.ensure_future(cluster.fail_over(keeps=keeps))
        await asyncio.sleep(9)
        assert await put(client, 2) == -900
        assert await took_s(failover) == pytest.approx(1, abs=0.01)
        await asyncio.sleep(1)
        assert await put(client, 2) == 0
        assert await get(client, 1) == (BODIES[1] if keeps else -704)

    play(scenario)


def test_f17_snapshot_restores_nothing_and_claims_otherwise() -> None:
    async def scenario(cluster: FakeMooncake, client: FakeClient) -> None:
        for number in range(30):
            await put(client, number)
        cluster.kill_master()
        assert cluster.restore_snapshot() == 30
        assert sum([await exist(client, number) for number in range(30)]) == 0

    play(scenario)


def test_f18_only_one_of_two_gets_of_a_name_in_a_batch_is_filled() -> None:
    async def scenario(_: FakeMooncake, client: FakeClient) -> None:
        await put(client, 1)
        first, second = memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE))
        assert await client.get(["1", "1"], [(first,), (second,)]) == [SIZE, SIZE]
        assert first != BODIES[1]
        assert second == BODIES[1]

    play(scenario)


def test_kvstore_calls_no_misleading_function_of_mooncake() -> None:
    """See F7 and F9: the code calls neither `get` nor `health_check` of the library."""
    for path in sorted((ROOT / "kvstore").rglob("*.py")):
        text = path.read_text()
        assert "health_check(" not in text, path
        if "mooncake" in path.stem:
            assert ".get_buffer(" not in text
            assert "_store.get(" not in text
