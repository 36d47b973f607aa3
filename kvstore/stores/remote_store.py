"""A page store over a remote store of named objects, which answers with codes and proves nothing."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.circuit_breaker import Rate
from tidemill.kvstore.stores.page_store import DAMAGED, Got, Held, Put, StoreCounters, StoreStats, finish
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES, Sealing

_Result = TypeVar("_Result")

Parts = tuple[memoryview, ...]
"""What an object consists of, end to end: its seal and its body, each where it lies."""

Offer = tuple[ObjectKey, memoryview]

NO_SPACE = -200
PUT_OUTCOMES = {
    0: Put.STORED,  # taken; what became of it is asked afterwards
    -705: Put.STORED,  # its name is taken, the same
    NO_SPACE: Put.FULL,
    -600: Put.FULL,  # larger than the memory of any owner
    -800: Put.OWNER_DOWN,
}
GET_OUTCOMES = {
    -703: Got.MISS,  # its writer has not finished, or died
    -704: Got.MISS,
    -600: Got.TRUNCATED,  # longer than its view
    -801: Got.CORRUPT,  # the library found out, where its own checksums are on
    -707: Got.EXPIRED,
    -800: Got.OWNER_DOWN,
}
"""Codes of Mooncake 0.3.13. All others, such as -900 and -901, mean that the master does not answer."""

LEASE_S = 10.0  # of a master that was told nothing else
NO_SPACE_PAUSES_S = (0.02, 0.06)  # the master makes space bit by bit, and only after it was asked for some
BATCH_BYTES_MAX = 256 << 20  # enough for full speed; a cancelled call ends with its batch
BATCH_OBJECTS_MAX = 256
INLINE_BYTES_MAX = 1 << 20  # another thread would take longer to wake up than to read so little


class RemoteClient(Protocol):
    """A remote store as its client library has it: names, memory and codes, nothing of ours.

    Codes are those of `PUT_OUTCOMES` and `GET_OUTCOMES`, negative for a failure. A call ends when nothing of
    it uses its memory any more, even if it is cancelled or late. Calls may overlap.
    """

    async def put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        """0 for each object that was taken, or that was there before; in any order."""
        ...

    async def get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        """The bytes of each object, now in its parts. One longer than its parts is refused, a shorter one
        answers its length. Names are distinct: of two equal ones Mooncake fills one, and says both."""
        ...

    async def exist(self, names: Sequence[str]) -> list[int]:
        """1 or 0, or a failure. Renews the leases of what is there."""
        ...

    async def remove(self, names: Sequence[str]) -> list[int]: ...

    def register(self, memory: memoryview) -> None: ...

    async def close(self) -> None: ...


class Listing(NamedTuple):
    """Everything that a remote store holds, whoever it belongs to."""

    objects: Sequence[tuple[str, int]]  # name and bytes
    capacity_bytes: int


class RemoteStore:
    """Seals objects, stores them batch by batch in order, and claims only what the remote store confirms.

    A code of 0 means little: another writer's bytes may have been kept, a writer that died may hold the name,
    or the object was evicted at once. So existence is asked after each batch, and the next one follows only
    when all of it is there. The objects of a batch are stored in any order; therefore no batch has a
    checkpoint and its pages.

    The remote store grants a lease when a get begins, and what arrives after its end is worthless. So a batch
    is as large as moves within half a lease at the rate measured so far.
    """

    def __init__(
        self,
        client: RemoteClient,
        *,
        sealing: Sealing = PLAIN,
        lease_s: float = LEASE_S,
        executor: Executor | None = None,
        listing: Callable[[], Awaitable[Listing]] | None = None,
    ) -> None:
        """`lease_s` is what the remote store grants. Seals are computed on `executor`, or where the caller
        is; `listing` answers or raises StoreError."""
        self._client = client
        self._sealing = sealing
        self._lease_s = lease_s
        self._executor = executor
        self._listing = listing
        self._rate = Rate()
        self._blocks: list[memoryview] = []  # not in use; each is registered once, for the seals of a batch
        self._tally = StoreCounters()
        self._known = Listing((), 0)

    async def put(self, objects: Sequence[Offer]) -> list[Put]:
        outcomes = await self._put(objects)
        outcomes += [Put.SKIPPED] * (len(objects) - len(outcomes))
        self._tally.put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Sequence[Offer]) -> list[Got]:
        outcomes = [Got.UNREACHABLE] * len(wanted)
        batches = list(self._batches(wanted))
        left, transfers = iter(batches), asyncio.Lock()
        lost: list[Got] = []

        async def fetch() -> None:
            with self._block() as block:
                while True:
                    async with transfers:
                        batch = next(left, None)
                        if batch is None:
                            return
                        parts = _parts(wanted[batch], block)
                        found = await self._transfer(wanted[batch], parts, lost)
                    outcomes[batch] = await self._verify(wanted[batch], parts, found)

        async with asyncio.TaskGroup() as group:  # one batch is verified while the next one moves
            for _ in batches[:2]:
                group.create_task(fetch())
        self._tally.get(wanted, outcomes)
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [code == 1 for code in await self._client.exist([str(key) for key in keys])] if keys else []

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        if keys:
            await self._client.remove([str(key) for key in keys])

    async def held(self) -> list[Held]:
        if self._listing is None:
            raise StoreError("this store cannot tell what it holds")
        self._known = await self._listing()
        return list(_ours(self._known))

    def register(self, memory: memoryview) -> None:
        self._client.register(memory)

    def patience_s(self, num_bytes: int) -> float:  # noqa: ARG002 - guard.py knows how long it may take
        return math.inf

    def stats(self) -> StoreStats:
        """What it holds is what `held` found last."""
        return self._tally.stats(
            objects=len(self._known.objects),
            num_bytes=sum(num_bytes for _, num_bytes in self._known.objects),
            capacity_bytes=self._known.capacity_bytes,
        )

    async def close(self) -> None:
        await self._client.close()

    async def _put(self, objects: Sequence[Offer]) -> list[Put]:
        """Outcomes up to the first object that is not there."""
        if not objects:
            return []
        existed = await self._client.exist([str(key) for key, _ in objects])
        if min(existed) < 0:
            return [Put.UNREACHABLE]
        named = {key for (key, _), code in zip(objects, existed, strict=True) if code}
        batches = list(self._batches(objects))
        new = [_first_of_each(objects[batch], named) for batch in batches]
        outcomes: list[Put] = []
        with self._block() as first, self._block() as second:
            async with asyncio.TaskGroup() as group:  # a batch is sealed while the one before it moves
                sealing = group.create_task(self._seal(new[0], first))
                for index, batch in enumerate(batches):
                    parts = await sealing
                    if index + 1 < len(batches):
                        sealing = group.create_task(
                            self._seal(new[index + 1], first if index % 2 else second)
                        )
                    stored = await self._store(new[index], parts)
                    for key, _ in objects[batch]:
                        outcomes.append(stored.pop(key, Put.EXISTED))
                        if not outcomes[-1].is_there:
                            return outcomes
        return outcomes

    async def _store(self, new: Sequence[Offer], parts: Sequence[Parts]) -> dict[ObjectKey, Put]:
        """Outcomes of the objects of a batch that were not there."""
        if not new:
            return {}
        names = [str(key) for key, _ in new]
        codes = await self._client.put(names, parts)
        for pause_s in NO_SPACE_PAUSES_S:
            again = [index for index, code in enumerate(codes) if code == NO_SPACE]
            if not again:
                break
            await asyncio.sleep(pause_s)
            later = await self._client.put(
                [names[index] for index in again], [parts[index] for index in again]
            )
            for index, code in zip(again, later, strict=True):
                codes[index] = code
        said = [PUT_OUTCOMES.get(code, Put.UNREACHABLE) for code in codes]
        there = [-1] * len(new) if Put.UNREACHABLE in said else await self._client.exist(names)
        return {key: _confirmed(put, code) for (key, _), put, code in zip(new, said, there, strict=True)}

    async def _transfer(
        self, batch: Sequence[Offer], parts: Sequence[Parts], lost: list[Got]
    ) -> list[Got | int]:
        """The length of each object that arrived, else its outcome. Who lost an owner or the master does not
        ask again: the other batches are lost in the same way."""
        if lost:
            return [lost[0]] * len(batch)
        loop = asyncio.get_running_loop()
        started = loop.time()
        codes = await self._client.get([str(key) for key, _ in batch], parts)
        found = [code if code >= 0 else GET_OUTCOMES.get(code, Got.UNREACHABLE) for code in codes]
        moved = [view.nbytes for (_, view), got in zip(batch, found, strict=True) if got != Got.MISS]
        if Got.UNREACHABLE in found or Got.OWNER_DOWN in found:
            lost.append(Got.UNREACHABLE if Got.UNREACHABLE in found else Got.OWNER_DOWN)
        else:
            self._rate.add(sum(moved), loop.time() - started)
        return found

    async def _verify(
        self, batch: Sequence[Offer], parts: Sequence[Parts], found: Sequence[Got | int]
    ) -> list[Got]:
        """Outcomes of a batch; what is damaged is deleted."""

        def verify() -> list[Got]:
            arrived = zip(batch, parts, found, strict=True)
            return [self._outcome(key, view, seal, got) for (key, view), (seal, _), got in arrived]

        outcomes = await self._read(batch, verify)
        damaged = [key for (key, _), got in zip(batch, outcomes, strict=True) if got in DAMAGED]
        await self.remove(damaged)
        return outcomes

    def _outcome(self, key: ObjectKey, view: memoryview, seal: memoryview, found: Got | int) -> Got:
        if isinstance(found, Got):
            return found
        return self._sealing.verify(key, view, seal) if found == SEAL_BYTES + view.nbytes else Got.TRUNCATED

    async def _seal(self, offers: Sequence[Offer], block: memoryview) -> list[Parts]:
        parts = _parts(offers, block)

        def seal() -> None:
            for (key, body), (place, _) in zip(offers, parts, strict=True):
                place[:] = self._sealing.seal(key, body)

        await self._read(offers, seal)
        return parts

    async def _read(self, offers: Sequence[Offer], work: Callable[[], _Result]) -> _Result:
        """Do what reads all bytes of `offers`, without holding up the event loop."""
        if self._executor is None or sum(body.nbytes for _, body in offers) <= INLINE_BYTES_MAX:
            return work()
        return await finish(asyncio.get_running_loop().run_in_executor(self._executor, work))

    def _batches(self, objects: Sequence[Offer]) -> Iterator[slice]:
        """Runs of one kind and distinct keys, small enough to move in time as far as one object is."""
        num_bytes_max = min(BATCH_BYTES_MAX, self._rate.bytes_per_s * self._lease_s / 2)
        start = num_bytes = 0
        named: set[ObjectKey] = set()
        for index, (key, body) in enumerate(objects):
            if index > start and (
                key.kind is not objects[start][0].kind
                or key in named
                or index - start == BATCH_OBJECTS_MAX
                or num_bytes + body.nbytes > num_bytes_max
            ):
                yield slice(start, index)
                start, num_bytes = index, 0
                named.clear()
            named.add(key)
            num_bytes += body.nbytes
        if objects:
            yield slice(start, len(objects))

    @contextmanager
    def _block(self) -> Generator[memoryview]:
        """Registered memory for the seals of a batch."""
        if self._blocks:
            block = self._blocks.pop()
        else:
            block = memoryview(bytearray(BATCH_OBJECTS_MAX * SEAL_BYTES))
            self._client.register(block)
        try:
            yield block
        finally:
            self._blocks.append(block)


def _parts(offers: Sequence[Offer], block: memoryview) -> list[Parts]:
    places = (block[start : start + SEAL_BYTES] for start in range(0, block.nbytes, SEAL_BYTES))
    return [(place, body) for place, (_, body) in zip(places, offers, strict=False)]


def _first_of_each(offers: Sequence[Offer], named: set[ObjectKey]) -> list[Offer]:
    """Those whose keys are not `named`; then they are."""
    new: dict[ObjectKey, memoryview] = {}
    for key, body in offers:
        if key not in named:
            named.add(key)
            new[key] = body
    return list(new.items())


def _confirmed(said: Put, exists: int) -> Put:
    """What became of an object that the remote store said this of when it was put, and then that."""
    if exists < 0:
        return Put.UNREACHABLE
    if exists:
        return said if said is Put.STORED else Put.EXISTED  # meanwhile somebody else has stored it
    return Put.UNCONFIRMED if said is Put.STORED else said


def _ours(listing: Listing) -> Iterator[Held]:
    for name, num_bytes in listing.objects:
        try:
            key = ObjectKey.parse(name)
        except ValueError:
            continue
        yield Held(key, num_bytes)
