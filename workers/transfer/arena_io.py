"""The arena's end of a transfer: objects for the store by where they lie in it."""

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
    """`store`, for objects by where they lie. Outcomes, order and cancellation are those of PageStore."""

    @property
    def store(self) -> PageStore: ...

    async def put(self, objects: Sequence[StagedObject]) -> list[Put]: ...

    async def get(self, wanted: Sequence[StagedObject]) -> list[Got]:
        """The bytes of an object are defined for HIT alone."""
        ...


class DirectIO:
    """The store itself reads and writes the arena: see staging.py for memory that it cannot reach."""

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
