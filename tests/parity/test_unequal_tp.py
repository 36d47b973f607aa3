# pyright: basic
# transformers' classes have no usable types.
"""A prompt computed by a group of one size is continued by a group of another, bit for bit."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.proof import ERROR_MAX_LINEAR
from tests.support.parity.sharded import SUMS_ERROR_MAX
from tests.support.waits import WAIT_S_MAX
from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.keys import Namespace, page_keys
from tidemill.kvstore.layout import PageId, StateId, WindowId, layout_of
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease, StateWrite
from tidemill.kvstore.shards import Shards, rank_share, shards_of
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.page_store import PageStore
from tidemill.workers.execution.model_runner import logits_of
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Row
from tidemill.workers.execution.step_tensors import inputs_of
from tidemill.workers.messages import Request
from tidemill.workers.models.architectures.registry import describe, load
from tidemill.workers.models.collectives import ALONE, Ranks, Sharing
from tidemill.workers.models.inputs import caches_of
from tidemill.workers.parallel.shared_memory import SharedMemory
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import RankTransfer, Transfer

P = 8
NUM_PAGES = 3
TOKENS = tuple(Random(3).choices(range(97), k=NUM_PAGES * P + 3))
KEYS = page_keys(Namespace(model="m", layout="l").root(), TOKENS[: NUM_PAGES * P], P)
PLACES = (3, 1, 0, 2)
MODELS: dict[str, dict[str, int]] = {
    "qwen3_next/moe-two-values": {
        "num_attention_heads": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "gpt_oss/alternating": {"sliding_window": P + 3},
    "granitemoehybrid/dense": {},
    "deepseek_v3/groups": {},
}
"""The changes to each model that let four ranks share it."""
DRAWS = SamplingState(Request(request_id="", tokens=TOKENS, max_new_tokens=1))


class Group:
    """A model on the threads of `size` ranks, each with an arena full of NaN, and its transfers."""

    def __init__(
        self, folder: Path, cpu: Operators, store: PageStore, shards: Shards, size: int, *, sums: bool
    ) -> None:
        self._threads = ThreadPoolExecutor(size)
        self._size = size
        self.late: list[asyncio.Future[int]] = []
        self._meeting = TemporaryDirectory()
        self._ranks = list(self._threads.map(self._meet, range(size)))
        loaded = [load(folder, cpu, lambda _done, _total: None, Sharing(rank, sums)) for rank in self._ranks]
        self.fingerprint = loaded[0].fingerprint
        self.models = [part.model for part in loaded]
        self.layout = layout_of(loaded[0].local_layers, P, extent_bytes_min=1, granule_bytes=1)
        page_bytes, window_bytes = self.layout.page_bytes, self.layout.window_bytes or 1
        first_window = -(-len(PLACES) * page_bytes // window_bytes)
        end_bytes = (first_window + len(PLACES)) * window_bytes if self.layout.has_windows else 4 * page_bytes
        first_slot = -(-end_bytes // (self.layout.state_stride_bytes or 1))
        end_bytes += 2 * self.layout.state_stride_bytes
        num_bytes = -(-end_bytes // self.layout.extent_bytes) * self.layout.extent_bytes
        arenas = [torch.full((num_bytes,), 0xFF, dtype=torch.uint8) for _ in self._ranks]
        self.caches = [caches_of(self.layout, arena) for arena in arenas]
        parts = [
            RankTransfer(self.layout, DirectIO(store, arena.numpy().data), rank_share(shards, rank, size))
            for rank, arena in enumerate(arenas)
        ]
        self.transfer = Transfer(self.layout, DirectIO(store, arenas[0].numpy().data), shards, parts[1:])
        self.pages = tuple(map(PageId, PLACES))
        self.windows = tuple(WindowId(first_window + place) for place in PLACES)
        self.slot = StateId(first_slot) if self.layout.has_states else None

    def run(self, start: int, end: int) -> torch.Tensor | None:
        """Logits after the last token of all; None of a step that ends before it."""
        row = Row(
            sequence_id="one",
            tokens=TOKENS[start:end],
            start=start,
            pages=self.pages,
            windows=self.windows if self.layout.has_windows else (),
            read=self.slot if start else None,
            writes=() if self.slot is None else (StateWrite(end, self.slot),),
            sampling_state=DRAWS if end == len(TOKENS) else None,
        )
        leader, *_ = self._threads.map(lambda rank: self._rank(rank, row), range(self._size))
        return leader

    def _rank(self, rank: int, row: Row) -> torch.Tensor | None:
        with torch.inference_mode():
            inputs = inputs_of((row,), list(row.tokens), P)
            hidden_TH = self.models[rank].forward(inputs, self.caches[rank])
            return logits_of(self.models[rank], hidden_TH, (row,))

    @property
    def last_window(self) -> range:
        return self.layout.last_window(NUM_PAGES)

    async def publish(self) -> bool:
        entries: list[Entry] = []
        for depth, (key, page) in enumerate(zip(KEYS, self.pages, strict=False), 1):
            entries.append(Entry(key, entries[-1] if entries else None, depth, page))
        states = () if self.slot is None else (self.slot,)
        entries[-1].checkpoint = Checkpoint(states, tuple(self.windows[i] for i in self.last_window))
        lease = Lease(P, shared_entries=entries, source=entries[-1])
        return await self.transfer.publish(lease, KEYS, 0, checkpoint=True)

    async def fetch(self) -> int:
        lease = Lease(
            P,
            private_pages=list(self.pages),
            spare_slots=[] if self.slot is None else [self.slot],
            windows=[self.windows[place] for place in self.last_window],
            first_window=self.last_window.start,
            fetched_windows=self.last_window,
        )
        return await self.transfer.fetch(lease, KEYS, NUM_PAGES, self.late.append)

    def _meet(self, rank: int) -> Ranks:
        if self._size == 1:
            return ALONE
        return SharedMemory(Path(self._meeting.name), rank, self._size, WAIT_S_MAX)

    def close(self) -> None:
        self._threads.shutdown()
        for rank in self._ranks:
            if isinstance(rank, SharedMemory):
                rank.close()
        self._meeting.cleanup()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(request.param, **MODELS[request.param])
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 1)])
async def test_prompt_computed_by_one_group_is_continued_by_another(
    folder: Path, cpu: Operators, tmp_path: Path, writers: int, readers: int, *, sums: bool
) -> None:
    """Compare bits; with ranks that add up, numbers."""
    layers, _ = describe(folder)
    shards = shards_of(layers, {1, writers, readers})
    boundary = NUM_PAGES * P

    store = FileStore(tmp_path, 1 << 30)
    groups = [Group(folder, cpu, store, shards, size, sums=sums) for size in (1, writers, readers)]
    assert len({group.fingerprint for group in groups}) == 1, "their keys would differ"
    cold, prefill, decode = groups
    wanted = cold.run(0, len(TOKENS))
    assert wanted is not None
    assert prefill.run(0, boundary) is None
    assert await prefill.publish()
    assert await decode.fetch() == NUM_PAGES
    found = decode.run(boundary, len(TOKENS))
    assert found is not None
    assert torch.equal(found, wanted) != sums
    allowed = ERROR_MAX_LINEAR if decode.layout.has_states else SUMS_ERROR_MAX
    assert float((found - wanted).norm() / wanted.norm()) < allowed
    for group in groups:
        group.close()
    await store.close()
