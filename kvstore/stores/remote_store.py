"""A page store over a remote store of named objects, whose result codes it does not trust."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.circuit_breaker import Rate
from tidemill.kvstore.stores.page_store import (
    DAMAGED,
    Got,
    Objects,
    Put,
    StoreCounters,
    StoredObject,
    StoreStats,
    finish,
    run_on,
    shares_of,
)
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES, Sealing

_Result = TypeVar("_Result")

Parts = tuple[memoryview, ...]
"""The parts of an object, to be concatenated: its seal and its body."""

Offer = tuple[ObjectKey, memoryview]

NO_SPACE = -200
PUT_OUTCOMES = {
    0: Put.STORED,  # accepted; a later call confirms it
    -705: Put.STORED,  # the name exists; confirmed likewise
    NO_SPACE: Put.FULL,
    -600: Put.FULL,  # larger than the memory of any owner
    -800: Put.OWNER_DOWN,
}
GET_OUTCOMES = {
    -703: Got.MISS,  # its writer has not finished, or crashed
    -704: Got.MISS,
    -600: Got.TRUNCATED,  # longer than its view
    -801: Got.CORRUPT,  # the library found it, if its own checksums are on
    -707: Got.EXPIRED,
    -800: Got.OWNER_DOWN,
}
"""The codes of Mooncake 0.3.13. All others, such as -900 and -901: the master does not answer."""

LEASE_S = 10.0  # the default of a master
NO_SPACE_PAUSES_S = (0.02, 0.06)  # the master evicts little by little, and only on demand
BATCH_BYTES_MAX = 256 << 20  # enough for full speed; a cancelled call ends after its batch
BATCH_OBJECTS_MAX = 256
INLINE_BYTES_MAX = 1 << 20  # waking another thread up takes longer than reading this


class RemoteClient(Protocol):
    """A remote store as its client library presents it: names, memory and codes.

    Codes are those of `PUT_OUTCOMES` and `GET_OUTCOMES`, negative for a failure. A call returns
    only when its memory is no longer used, even if it is cancelled or late. Calls may overlap.
    """

    async def put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        """Store objects in any order; return 0 for each that was accepted or existed before."""
        ...

    async def get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        """Read each object into its parts; return its length, or a code.

        An object longer than its parts is refused. Names must be distinct: of two equal names
        Mooncake fills one and reports success for both.
        """
        ...

    async def exist(self, names: Sequence[str]) -> list[int]:
        """Return 1 or 0, or a failure. Renews the leases of existing objects."""
        ...

    async def remove(self, names: Sequence[str]) -> list[int]: ...

    def register(self, memory: memoryview) -> None: ...

    async def close(self) -> None: ...


class Listing(NamedTuple):
    """All objects of a remote store, also those that are not ours."""

    objects: Sequence[tuple[str, int]]  # name and bytes
    capacity_bytes: int


class RemoteStore:
    """Seals objects, stores them batch by batch in order, and confirms that they are stored.

    A code of 0 proves little: the store may have kept the bytes of another writer, a crashed writer
    may block the name, or the object was evicted immediately. So the store checks after each batch
    that its objects exist, and only then puts the next one. The objects of a batch are stored in
    any order, so no batch has a checkpoint together with its pages.

    The remote store grants a lease when a get begins, and bytes that arrive after its end are
    invalid. So a batch is as large as the measured rate moves within half a lease.
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
        """Compute seals on `executor`, or on the caller's thread without one. `lease_s` is the lease that the
        remote store grants; `listing` lists it or raises StoreError."""
        self._client = client
        self._sealing = sealing
        self._lease_s = lease_s
        self._executor = executor
        self._listing = listing
        self._rate = Rate()
        self._blocks: list[memoryview] = []  # free registered blocks for the seals of a batch
        self._counters = StoreCounters()
        self._last_listing = Listing((), 0)

    async def put(self, objects: Objects) -> list[Put]:
        outcomes = await self._put(objects)
        outcomes += [Put.SKIPPED] * (len(objects) - len(outcomes))
        self._counters.add_put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Objects) -> list[Got]:
        outcomes = [Got.UNREACHABLE] * len(wanted)
        batches = list(self._batches(wanted))
        remaining, transfers = iter(batches), asyncio.Lock()
        failures: list[Got] = []

        async def fetch() -> None:
            with self._block() as block:
                while True:
                    async with transfers:
                        batch = next(remaining, None)
                        if batch is None:
                            return
                        parts = _parts(wanted[batch], block)
                        found = await self._transfer(wanted[batch], parts, failures)
                    outcomes[batch] = await self._verify(wanted[batch], parts, found)

        async with asyncio.TaskGroup() as group:  # verifies a batch while the next one is transferred
            for _ in batches[:2]:
                group.create_task(fetch())
        self._counters.add_get(wanted, outcomes)
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [code == 1 for code in await self._client.exist([str(key) for key in keys])] if keys else []

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        if keys:
            await self._client.remove([str(key) for key in keys])

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        pass

    async def list_objects(self) -> list[StoredObject]:
        if self._listing is None:
            raise StoreError("this store cannot list its objects")
        self._last_listing = await self._listing()
        return list(_parse(self._last_listing))

    def register(self, memory: memoryview) -> None:
        self._client.register(memory)

    def patience_s(self, num_bytes: int) -> float:  # noqa: ARG002 - the circuit breaker has the limit
        return math.inf

    def stats(self) -> StoreStats:
        """Return counts; those of objects and bytes are from the last `list_objects`."""
        stats = self._counters.stats(
            objects=len(self._last_listing.objects),
            num_bytes=sum(num_bytes for _, num_bytes in self._last_listing.objects),
            capacity_bytes=self._last_listing.capacity_bytes,
        )
        return replace(stats, free_bytes=0)  # the listing is old

    async def close(self) -> None:
        await self._client.close()

    async def _put(self, objects: Objects) -> list[Put]:
        """Return the outcomes up to the first missing object."""
        if not objects:
            return []
        existed = await self._client.exist([str(key) for key, _ in objects])
        if min(existed) < 0:
            return [Put.UNREACHABLE]
        seen = {key for (key, _), code in zip(objects, existed, strict=True) if code}
        batches = list(self._batches(objects))
        new = [_pop_new(objects[batch], seen) for batch in batches]
        outcomes: list[Put] = []
        with self._block() as even, self._block() as odd:
            async with asyncio.TaskGroup() as group:  # seals a batch while the one before it is transferred
                sealing = group.create_task(self._seal(new[0], even))
                for index, batch in enumerate(batches):
                    parts = await sealing
                    if index + 1 < len(batches):
                        sealing = group.create_task(self._seal(new[index + 1], even if index % 2 else odd))
                    stored = await self._store(new[index], parts)
                    for key, _ in objects[batch]:
                        outcomes.append(stored.pop(key, Put.EXISTED))
                        if not outcomes[-1].is_there:
                            return outcomes
        return outcomes

    async def _store(self, new: Objects, parts: Sequence[Parts]) -> dict[ObjectKey, Put]:
        """Store the objects of a batch that are missing, and return their outcomes."""
        if not new:
            return {}
        names = [str(key) for key, _ in new]
        codes = await self._client.put(names, parts)
        for pause_s in NO_SPACE_PAUSES_S:
            refused = [index for index, code in enumerate(codes) if code == NO_SPACE]
            if not refused:
                break
            await asyncio.sleep(pause_s)
            retried = await self._client.put(
                [names[index] for index in refused], [parts[index] for index in refused]
            )
            for index, code in zip(refused, retried, strict=True):
                codes[index] = code
        puts = [PUT_OUTCOMES.get(code, Put.UNREACHABLE) for code in codes]
        exist = [-1] * len(new) if Put.UNREACHABLE in puts else await self._client.exist(names)
        return {key: _confirm(put, code) for (key, _), put, code in zip(new, puts, exist, strict=True)}

    async def _transfer(self, batch: Objects, parts: Sequence[Parts], failures: list[Got]) -> list[Got | int]:
        """Return the length of each object that arrived, else its outcome. After the failure of an owner or
        the master, the other batches fail without another call."""
        if failures:
            return [failures[0]] * len(batch)
        loop = asyncio.get_running_loop()
        started = loop.time()
        codes = await self._client.get([str(key) for key, _ in batch], parts)
        found = [code if code >= 0 else GET_OUTCOMES.get(code, Got.UNREACHABLE) for code in codes]
        moved = [view.nbytes for (_, view), got in zip(batch, found, strict=True) if got != Got.MISS]
        if Got.UNREACHABLE in found or Got.OWNER_DOWN in found:
            failures.append(Got.UNREACHABLE if Got.UNREACHABLE in found else Got.OWNER_DOWN)
        else:
            self._rate.add(sum(moved), loop.time() - started)
        return found

    async def _verify(self, batch: Objects, parts: Sequence[Parts], found: Sequence[Got | int]) -> list[Got]:
        """Return the outcomes of a batch, and remove damaged objects."""

        def verify(share: slice) -> list[Got]:
            arrived = zip(batch[share], parts[share], found[share], strict=True)
            return [self._outcome(key, view, seal, got) for (key, view), (seal, _), got in arrived]

        outcomes = [got for share in await self._read(batch, verify) for got in share]
        damaged = [key for (key, _), got in zip(batch, outcomes, strict=True) if got in DAMAGED]
        await self.remove(damaged)
        return outcomes

    def _outcome(self, key: ObjectKey, view: memoryview, seal: memoryview, found: Got | int) -> Got:
        if isinstance(found, Got):
            return found
        return self._sealing.verify(key, view, seal) if found == SEAL_BYTES + view.nbytes else Got.TRUNCATED

    async def _seal(self, offers: Objects, block: memoryview) -> list[Parts]:
        parts = _parts(offers, block)

        def seal(share: slice) -> None:
            for (key, body), (view, _) in zip(offers[share], parts[share], strict=True):
                view[:] = self._sealing.seal(key, body)

        await self._read(offers, seal)
        return parts

    async def _read(self, offers: Objects, work: Callable[[slice], _Result]) -> list[_Result]:
        """Run `work`, which reads all bytes of some offers, on threads, without blocking the event loop."""
        if self._executor is None or sum(body.nbytes for _, body in offers) <= INLINE_BYTES_MAX:
            return [work(slice(len(offers)))]
        shares = [run_on(self._executor, partial(work, share)) for share in shares_of(offers)]
        return await finish(asyncio.gather(*shares))

    def _batches(self, objects: Objects) -> Iterator[slice]:
        """Split into runs of one kind with distinct keys, each within half a lease if possible."""
        num_bytes_max = min(BATCH_BYTES_MAX, self._rate.bytes_per_s * self._lease_s / 2)
        start = num_bytes = 0
        keys: set[ObjectKey] = set()
        for index, (key, body) in enumerate(objects):
            if index > start and (
                key.kind is not objects[start][0].kind
                or key in keys
                or index - start == BATCH_OBJECTS_MAX
                or num_bytes + body.nbytes > num_bytes_max
            ):
                yield slice(start, index)
                start, num_bytes = index, 0
                keys.clear()
            keys.add(key)
            num_bytes += body.nbytes
        if objects:
            yield slice(start, len(objects))

    @contextmanager
    def _block(self) -> Generator[memoryview]:
        """Lend registered memory for the seals of a batch."""
        if self._blocks:
            block = self._blocks.pop()
        else:
            block = memoryview(bytearray(BATCH_OBJECTS_MAX * SEAL_BYTES))
            self._client.register(block)
        try:
            yield block
        finally:
            self._blocks.append(block)


def _parts(offers: Objects, block: memoryview) -> list[Parts]:
    seals = (block[start : start + SEAL_BYTES] for start in range(0, block.nbytes, SEAL_BYTES))
    return [(seal, body) for seal, (_, body) in zip(seals, offers, strict=False)]


def _pop_new(offers: Objects, seen: set[ObjectKey]) -> list[Offer]:
    """Return the first offer of each key that is not in `seen`, and add the keys to `seen`."""
    new: dict[ObjectKey, memoryview] = {}
    for key, body in offers:
        if key not in seen:
            seen.add(key)
            new[key] = body
    return list(new.items())


def _confirm(put: Put, exists: int) -> Put:
    """Return the outcome of a put, given the later answer whether the object exists."""
    if exists < 0:
        return Put.UNREACHABLE
    if exists:
        return put if put is Put.STORED else Put.EXISTED  # another writer has stored it in the meantime
    return Put.UNCONFIRMED if put is Put.STORED else put


def _parse(listing: Listing) -> Iterator[StoredObject]:
    """Yield the objects whose names are keys of ours."""
    for name, num_bytes in listing.objects:
        try:
            key = ObjectKey.parse(name)
        except ValueError:
            continue
        yield StoredObject(key, num_bytes)
