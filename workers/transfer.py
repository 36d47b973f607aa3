"""Moves pages and checkpoints between leases and the store; a loss is an ordinary outcome here."""

from collections.abc import Sequence

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId
from tidemill.kvstore.lease import Lease
from tidemill.kvstore.store import Got, PageStore, Put


class Transfer:
    def __init__(self, layout: Layout, memory: memoryview, store: PageStore) -> None:
        self.store = store
        self._layout = layout
        self._memory = memory

    async def restorable_depths(self, keys: Sequence[PageKey], above_pages: int) -> list[int]:
        """Depths in pages, above `above_pages` and up to all of `keys`, ascending, where the store can
        resume.

        For a hybrid these are the checkpoints it holds, each of which says that its pages were stored before
        it; without states every page of an unbroken run is one.
        """
        if self._layout.hybrid:
            held = await self.store.contains([ObjectKey(Kind.CHECKPOINT, key) for key in keys[above_pages:]])
            return [above_pages + index + 1 for index, is_held in enumerate(held) if is_held]
        held = await self.store.contains([ObjectKey(Kind.PAGE, key) for key in keys[above_pages:]])
        unbroken = held.index(False) if False in held else len(held)
        return list(range(above_pages + 1, above_pages + unbroken + 1))

    async def fetch(self, lease: Lease, keys: Sequence[PageKey], num_pages: int) -> int:
        """Fill the lease's own pages up to `num_pages` and its `fetch_slot`; answers how many pages are good.

        `num_pages` is the answer only when the checkpoint arrived too. Nothing is committed here.
        """
        first = len(lease.entries)
        wanted = [
            (ObjectKey(Kind.PAGE, keys[index]), self._page(lease.own[index - first]))
            for index in range(first, num_pages)
        ]
        if self._layout.hybrid:
            wanted.append((ObjectKey(Kind.CHECKPOINT, keys[num_pages - 1]), self._state(lease.fetch_slot)))
        got = await self.store.get(wanted)
        bad = next((index for index, outcome in enumerate(got) if outcome is not Got.HIT), None)
        if bad is None:
            return num_pages
        return min(first + bad, num_pages - 1)

    async def publish(self, lease: Lease, keys: Sequence[PageKey]) -> bool:
        """Store the lease's shared pages in order, then the checkpoint at their end; True when all are
        there."""
        objects = [
            (ObjectKey(Kind.PAGE, key), self._page(entry.page))
            for key, entry in zip(keys, lease.entries, strict=False)
        ]
        if lease.source is not None and lease.source.checkpoint is not None:
            objects.append(
                (ObjectKey(Kind.CHECKPOINT, lease.source.key), self._state(lease.source.checkpoint))
            )
        held = await self.store.contains([key for key, _ in objects])
        missing = [one for one, is_held in zip(objects, held, strict=True) if not is_held]
        return Put.REFUSED not in await self.store.put(missing) if missing else True

    async def holds(self, keys: Sequence[PageKey]) -> bool:
        """Whether the store holds every page of `keys` and, for a hybrid, the checkpoint at their end."""
        objects = [ObjectKey(Kind.PAGE, key) for key in keys]
        if self._layout.hybrid:
            objects.append(ObjectKey(Kind.CHECKPOINT, keys[-1]))
        return all(await self.store.contains(objects))

    def _page(self, page: PageId) -> memoryview:
        offset = self._layout.page_offset(page)
        return self._memory[offset : offset + self._layout.page_bytes]

    def _state(self, state: StateId) -> memoryview:
        offset = self._layout.state_offset(state)
        return self._memory[offset : offset + self._layout.state_bytes]
