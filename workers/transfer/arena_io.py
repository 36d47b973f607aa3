"""The arena's end of a transfer: objects for the store by where they lie in it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.page_store import Got, PageStore, Put


class Placed(NamedTuple):
    """An object, and its bytes `[offset, offset + num_bytes)` of the arena."""

    key: ObjectKey
    offset: int
    num_bytes: int


class Places(Protocol):
    """`store`, for objects by where they lie. Outcomes, order and cancellation are those of PageStore."""

    @property
    def store(self) -> PageStore: ...

    async def put(self, objects: Sequence[Placed]) -> list[Put]: ...

    async def get(self, wanted: Sequence[Placed]) -> list[Got]:
        """The bytes of an object are defined for HIT alone."""
        ...


class Direct:
    """The store itself reads and writes the arena: see staging.py for memory that it cannot reach."""

    def __init__(self, store: PageStore, memory: memoryview) -> None:
        store.register(memory)
        self.store = store
        self._memory = memory

    async def put(self, objects: Sequence[Placed]) -> list[Put]:
        return await self.store.put([self._view(placed) for placed in objects])

    async def get(self, wanted: Sequence[Placed]) -> list[Got]:
        return await self.store.get([self._view(placed) for placed in wanted])

    def _view(self, placed: Placed) -> tuple[ObjectKey, memoryview]:
        return placed.key, self._memory[placed.offset : placed.offset + placed.num_bytes]
