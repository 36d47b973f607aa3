"""A Mooncake store in virtual time with all failures that were observed on the real one.

Its behaviour and its figures were measured on Mooncake 0.3.13.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

from tests.support.sim.fake_master import (
    EXPIRED,
    INVALID,
    MASTER_FAILED,
    NO_SPACE,
    OK,
    OWNER_FAILED,
    REMOUNT_S,
    Entry,
    Master,
    Owner,
)
from tidemill.kvstore.stores.page_store import finish
from tidemill.kvstore.stores.remote_store import Parts

T = TypeVar("T")

RPC_S_MAX = 0.001
NOTICED_S = 0.0004  # of the first call after a crash of the master
RECONNECT_S = 4.3  # of each later call
FROZEN_S = 30.0  # of a call to a stopped or unreachable process
DEAD_READ_S = 0.008
DEAD_WRITE_S = 1.0
FAILOVER_S = 10.0
STALL_S_MAX = 3.0


class FakeMooncake:
    """A master and owners. Equal `rng` and equal order of calls give equal faults.

    ghosts, full    probability per object put: a crashed writer still holds its name; no space is reported
                    although there is some
    damage          probability per object put: a bit of it flips in the memory of its owner
    stalls          probability per get: its owners stop for up to STALL_S_MAX
    late_writes     RDMA: a read from an owner that does not answer writes its memory when it times out
    bytes_per_s     the rate of each call; a read that outlasts its lease takes all its time and fails
    """

    def __init__(
        self,
        rng: Random,
        *,
        capacity_bytes: int = 1 << 30,
        lease_s: float = 5.0,
        bytes_per_s: float = 1e9,
        ghosts: float = 0.0,
        full: float = 0.0,
        damage: float = 0.0,
        stalls: float = 0.0,
        late_writes: bool = False,
    ) -> None:
        """`capacity_bytes` is the memory of each owner."""
        self.rng = rng
        self.bytes_per_s, self.late_writes = bytes_per_s, late_writes
        self.ghosts, self.full, self.damage, self.stalls = ghosts, full, damage, stalls
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.lease_s = lease_s
        self.master = Master(rng, self.clock, lease_s)
        self.owners = [Owner(capacity_bytes=capacity_bytes) for _ in range(2)]
        self.master.owners += self.owners
        self.master_is_dead = self.master_is_frozen = False
        self._capacity_bytes = capacity_bytes
        self._thawed = asyncio.Event()

    @property
    def running_owners(self) -> list[Owner]:
        return [owner for owner in self.owners if not owner.is_silent]

    @property
    def frozen_owners(self) -> list[Owner]:
        return [owner for owner in self.owners if owner.is_frozen]

    def client(self) -> "FakeClient":
        return FakeClient(self)

    def kill_master(self) -> None:
        self.master_is_dead = True

    def start_master(self, *, keeps: bool = False) -> None:
        """Start the master, with its objects if it `keeps` a log of its operations in etcd."""
        self.master_is_dead = False
        if not keeps:
            self.master.forget()

    async def fail_over(self, *, keeps: bool) -> None:
        """Crash the leader, and let another one take over."""
        self.kill_master()
        await asyncio.sleep(FAILOVER_S)
        self.start_master(keeps=keeps)

    def freeze_master(self) -> None:
        self.master_is_frozen = True

    def thaw_master(self) -> None:
        self.master_is_frozen = False
        self._wake()

    def kill_owner(self, owner: Owner) -> None:
        owner.is_dead, owner.is_frozen = True, False
        owner.silent_since = self.clock()
        self._wake()

    def start_owner(self) -> Owner:
        owner = Owner(capacity_bytes=self._capacity_bytes, mounts_at=self.clock() + REMOUNT_S)
        self.owners.append(owner)
        self.master.owners.append(owner)
        return owner

    def freeze_owner(self, owner: Owner) -> None:
        owner.is_frozen = True
        owner.silent_since = self.clock()

    def thaw_owner(self, owner: Owner) -> None:
        """Let an owner continue, with empty memory if the master has forgotten it meanwhile."""
        if owner.is_dead:
            return
        self.master.advance()
        owner.is_frozen = False
        owner.silent_since = None
        if owner not in self.master.owners:
            owner.mounts_at = self.clock() + REMOUNT_S
            self.master.owners.append(owner)
        self._wake()

    def corrupt(self, name: str) -> None:
        """Flip one bit in the memory of its owner, silently."""
        body = self.master.entries[name].body
        body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)

    async def resumes(self, is_frozen: Callable[[], bool]) -> bool:
        """Wait for a frozen process. Return whether it resumes before a call times out."""
        try:
            async with asyncio.timeout(FROZEN_S):
                while is_frozen():
                    await self._thawed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._thawed.set()
        self._thawed = asyncio.Event()


class FakeClient:
    """The RemoteClient of one process."""

    def __init__(self, cluster: FakeMooncake) -> None:
        self._cluster = cluster
        self._running: set[asyncio.Future[Any]] = set()
        self._reconnects = False

    async def put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        return await self._run(self._put(names, objects))

    async def get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        return await self._run(self._get(names, objects))

    async def exist(self, names: Sequence[str]) -> list[int]:
        query = self._cluster.master.query
        return await self._run(self._call_master(names, lambda name: int(isinstance(query(name), Entry))))

    async def remove(self, names: Sequence[str]) -> list[int]:
        return await self._run(self._call_master(names, self._cluster.master.remove))

    def register(self, memory: memoryview) -> None:
        pass

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
        running = asyncio.ensure_future(call)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await finish(running)

    async def _rpc(self) -> int:
        """Reach the master, or fail after the time that this takes."""
        cluster = self._cluster
        if cluster.master_is_dead:
            await asyncio.sleep(RECONNECT_S if self._reconnects else NOTICED_S)
            self._reconnects = True
            return MASTER_FAILED
        self._reconnects = False
        if not await cluster.resumes(lambda: cluster.master_is_frozen):
            return MASTER_FAILED
        await asyncio.sleep(cluster.rng.random() * RPC_S_MAX)
        return MASTER_FAILED if cluster.master_is_dead else OK

    async def _call_master(self, names: Sequence[str], answer: Callable[[str], int]) -> list[int]:
        failed = await self._rpc()
        return [failed or answer(name) for name in names]

    async def _put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        """Read one half of each object at the start of its transfer, the other one at the end."""
        failed = await self._rpc()
        if failed:
            return [failed] * len(names)
        begun = [self._begin(name, _size(parts)) for name, parts in zip(names, objects, strict=True)]
        moving = [
            (entry, parts) for entry, parts in zip(begun, objects, strict=True) if isinstance(entry, Entry)
        ]
        for entry, parts in moving:
            entry.body[: len(entry.body) // 2] = b"".join(parts)[: len(entry.body) // 2]
        await self._move(moving, DEAD_WRITE_S)
        for entry, parts in moving:
            entry.body[len(entry.body) // 2 :] = b"".join(parts)[len(entry.body) // 2 :]
        failed = await self._rpc() if moving else OK
        return [failed or self._end(entry) if isinstance(entry, Entry) else entry for entry in begun]

    def _begin(self, name: str, num_bytes: int) -> Entry | int:
        cluster = self._cluster
        if name not in cluster.master.entries and cluster.rng.random() < cluster.ghosts:
            cluster.master.begin_put(name, num_bytes)
        if cluster.rng.random() < cluster.full:
            return NO_SPACE
        return cluster.master.begin_put(name, num_bytes)

    def _end(self, entry: Entry) -> int:
        if entry.owner.is_silent:
            self._cluster.master.revoke_put(entry)
            return OWNER_FAILED
        ended = self._cluster.master.end_put(entry)
        if ended == OK and self._cluster.rng.random() < self._cluster.damage:
            self._cluster.corrupt(entry.name)
        return ended

    async def _get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        """Fill the memory with noise as soon as bytes move, and with the object at the end.

        If a name occurs twice, only the memory of the last one gets the object.
        """
        failed = await self._rpc()
        if failed:
            return [failed] * len(names)
        started = self._cluster.clock()
        found = [self._find(name, _size(parts)) for name, parts in zip(names, objects, strict=True)]
        moving = [
            (entry, parts) for entry, parts in zip(found, objects, strict=True) if isinstance(entry, Entry)
        ]
        for entry, parts in moving:
            if not entry.owner.is_silent:
                self._spoil(parts)
        if self._cluster.rng.random() < self._cluster.stalls:
            self._stall({entry.owner for entry, _ in moving})
        await self._move(moving, DEAD_READ_S)
        expired = self._cluster.clock() - started > self._cluster.lease_s
        last = {name: index for index, name in enumerate(names)}
        return [
            self._arrive(entry, objects[index] if last[entry.name] == index else (), expired=expired)
            if isinstance(entry, Entry)
            else entry
            for index, entry in enumerate(found)
        ]

    def _stall(self, owners: Iterable[Owner]) -> None:
        for owner in owners:
            if not owner.is_silent:
                self._cluster.freeze_owner(owner)
                stall_s = self._cluster.rng.random() * STALL_S_MAX
                asyncio.get_running_loop().call_later(stall_s, self._cluster.thaw_owner, owner)

    def _find(self, name: str, num_bytes: int) -> Entry | int:
        entry = self._cluster.master.query(name)
        return INVALID if isinstance(entry, Entry) and len(entry.body) > num_bytes else entry

    def _arrive(self, entry: Entry, parts: Parts, *, expired: bool) -> int:
        if entry.owner.is_silent:
            if self._cluster.late_writes:
                self._spoil(parts)
            return OWNER_FAILED
        if expired:
            return EXPIRED
        if self._cluster.master.entries.get(entry.name) is entry:
            _fill(parts, entry.body)
        else:
            self._spoil(parts)  # it was removed by force, and its memory reused
        return len(entry.body)

    async def _move(self, moving: Sequence[tuple[Entry, Parts]], dead_s: float) -> None:
        """Wait for the transfer of the bytes, and for owners that do not answer."""
        owners = {entry.owner for entry, _ in moving}
        if any(owner.is_dead for owner in owners):
            await asyncio.sleep(dead_s)
        await self._cluster.resumes(lambda: any(owner.is_frozen for owner in owners))
        num_bytes = sum(len(entry.body) for entry, _ in moving)
        await asyncio.sleep(num_bytes / self._cluster.bytes_per_s)

    def _spoil(self, parts: Parts) -> None:
        _fill(parts, self._cluster.rng.randbytes(_size(parts)))


def _fill(parts: Iterable[memoryview], stored: bytes | bytearray) -> None:
    """Write the stored bytes into the parts, one after the other."""
    start = 0
    for view in parts:
        piece = stored[start : start + view.nbytes]
        view[: len(piece)] = piece
        start += view.nbytes


def _size(parts: Parts) -> int:
    return sum(view.nbytes for view in parts)
