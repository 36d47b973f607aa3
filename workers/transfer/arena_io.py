"""The arena's end of a transfer: objects for the store, by their position in it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.page_store import Got, PageStore, Put


class StagedObject(NamedTuple):
    """An object, and its bytes `[offset, offset + num_bytes)` of the arena."""

    key: ObjectKey
    offset: int
    num_bytes: int


class ArenaIO(Protocol):
    """A page store for objects in the arena. Outcomes, order and cancellation are those of PageStore."""

    @property
    def store(self) -> PageStore: ...

    async def put(self, objects: Sequence[StagedObject]) -> list[Put]: ...

    async def get(self, wanted: Sequence[StagedObject]) -> list[Got]:
        """Fetch objects. The bytes of an object are defined only for HIT."""
        ...


class DirectIO:
    """Lets the store itself read and write the arena. For memory that it cannot access see staging.py."""

    def __init__(self, store: PageStore, memory: memoryview) -> None:
        store.register(memory)
        self.store = store
        self._memory = memory

    async def put(self, objects: Sequence[StagedObject]) -> list[Put]:
        return await self.store.put([self._view(staged) for staged in objects])

    async def get(self, wanted: Sequence[StagedObject]) -> list[Got]:
        return await self.store.get([self._view(staged) for staged in wanted])

    def _view(self, staged: StagedObject) -> tuple[ObjectKey, memoryview]:
        return staged.key, self._memory[staged.offset : staged.offset + staged.num_bytes]
