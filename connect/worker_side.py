"""The half of the connector in a vLLM worker: copies blocks between its KV caches and the store."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from tidemill.connect.blocks import GroupMemory
from tidemill.connect.groups import BlockMove, Groups
from tidemill.connect.store_thread import StoreThread
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.page_store import Got, Put

SAVING_BYTES_MAX = 256 << 20
"""The limit of host memory of saves that the store has not taken; beyond it blocks are not saved."""


class Staged(NamedTuple):
    """Moves of blocks of one group, and the host memory of them, uint8 `[moves, block_bytes]`."""

    moves: list[BlockMove]
    stage_NB: Tensor


class Loading(NamedTuple):
    """A load of a request that the store works on."""

    parts: list[Staged]
    got: "Future[list[Got]]"


class Loaded(NamedTuple):
    """The requests whose loads have ended, those of them that failed, and the blocks that did not arrive."""

    ended: set[str]
    failed: set[str]
    missing_blocks: set[int]


class WorkerSide:
    """Loads and saves on one rank. The engine's memory is only read and written in calls, by their thread."""

    def __init__(
        self, groups: Groups, rank: int, store: StoreThread, memories: Sequence[GroupMemory]
    ) -> None:
        self._groups = groups
        self._rank = rank
        self._store = store
        self._memories = memories
        self._loading: dict[str, Loading] = {}
        self._saving: dict[Future[list[Put]], int] = {}  # with the bytes of each
        self._counted = Counter[str]()
        self._counts = Counter[str]()

    def load(self, loads: Mapping[str, Sequence[BlockMove]]) -> None:
        """Begin to fetch the blocks of each request."""
        for request_id, moves in loads.items():
            parts = self._stage(moves)
            self._loading[request_id] = Loading(parts, self._store.get(self._objects(parts)))

    def take_loaded(self) -> Loaded:
        """Write the blocks that have arrived into the caches, and return the requests whose loads have ended.

        Of one group, a request keeps the blocks before the first that is missing; of several, none.
        """
        done = [request_id for request_id, loading in self._loading.items() if loading.got.done()]
        failed: set[str] = set()
        missing: set[int] = set()
        for request_id in done:
            parts, got = self._loading.pop(request_id)
            outcomes = iter(got.result())
            for moves, stage_NB in parts:
                arrived = [next(outcomes) is Got.HIT for _ in moves]
                absent = [move.block for move, is_hit in zip(moves, arrived, strict=True) if not is_hit]
                if absent:
                    failed.add(request_id)
                    missing.update(absent)
                hits = [index for index, is_hit in enumerate(arrived) if is_hit]
                self._memories[moves[0].group].write([moves[index].block for index in hits], stage_NB[hits])
        self._counts.update({"loads whole": len(done) - len(failed), "loads failed": len(failed)})
        return Loaded(set(done), failed, missing)

    def save(self, requests: Iterable[Sequence[BlockMove]]) -> None:
        """Copy the blocks of each request, and begin to store them. The blocks may be reused afterwards."""
        self._saving = {put: size for put, size in self._saving.items() if not put.done()}
        for moves in requests:
            size = sum(self._memories[move.group].block_bytes for move in moves)
            if sum(self._saving.values()) + size > SAVING_BYTES_MAX or self._store.is_down:
                self._counts["unsaved_blocks"] += len(moves)
                continue
            parts = self._stage(moves)
            for part in parts:
                self._memories[part.moves[0].group].read([move.block for move in part.moves], part.stage_NB)
            self._saving[self._store.put(self._objects(parts), self._memories[0].fence())] = size

    def take_counts(self) -> dict[str, int]:
        """Return what is new, by the name of a counter of connect/vllm.py and the values of its labels."""
        stats = self._store.stats()
        counts = self._counts.copy()
        counts.update({f"objects load {outcome.value}": count for outcome, count in stats.got.items()})
        counts.update({f"objects save {outcome.value}": count for outcome, count in stats.put.items()})
        counts.update({"bytes load": stats.get_bytes, "bytes save": stats.put_bytes, "trips": stats.trips})
        new = counts - self._counted
        self._counted = counts
        return dict(new)

    def _stage(self, moves: Sequence[BlockMove]) -> list[Staged]:
        """Return host memory for the blocks of each group, in the order of the moves."""
        by_group: dict[int, list[BlockMove]] = {}
        for move in moves:
            by_group.setdefault(move.group, []).append(move)
        return [Staged(some, self._memories[group].stage(len(some))) for group, some in by_group.items()]

    def _objects(self, parts: Sequence[Staged]) -> list[tuple[ObjectKey, memoryview]]:
        return [
            (self._groups.object_key(move.group, move.key, self._rank), memoryview(row_B))
            for moves, stage_NB in parts
            for move, row_B in zip(moves, stage_NB.numpy(), strict=True)
        ]
