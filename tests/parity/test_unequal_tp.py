"""A prompt computed by a group of one size is continued by a group of another, bit for bit."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.proof import ERROR_MAX_LINEAR
from tests.support.parity.sharded import SUMS_ERROR_MAX
from tests.support.parity.steps import Runner
from tests.support.waits import WAIT_S_MAX
from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.keys import Namespace, page_keys
from tidemill.kvstore.layout import KvDtype, PageId, StateId, WindowId
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.shards import Shards, rank_share, shards_of
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.page_store import PageStore
from tidemill.workers.models.architectures.registry import describe, load, no_progress
from tidemill.workers.models.collectives import ALONE, Ranks, Sharing
from tidemill.workers.parallel.shared_memory import SharedMemory
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import RankTransfer, Transfer

P = 8
NUM_PAGES = 3
TOKENS = tuple(Random(3).choices(range(97), k=NUM_PAGES * P + 3))
KEYS = page_keys(Namespace(model="m", layout="l").root(), TOKENS[: NUM_PAGES * P], P)
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


class Group(ExitStack):
    """A model on the threads of `size` ranks, each with an arena full of NaN, and its transfers."""

    def __init__(
        self,
        folder: Path,
        cpu: Operators,
        store: PageStore,
        shards: Shards,
        size: int,
        *,
        sums: bool,
        kv_dtype: KvDtype,
    ) -> None:
        super().__init__()
        meeting, self._size = Path(self.enter_context(TemporaryDirectory())), size
        self._threads = self.enter_context(ThreadPoolExecutor(size))
        meet = partial(SharedMemory, meeting, size=size, wait_s_max=WAIT_S_MAX)
        ranks: list[Ranks] = [ALONE]
        if size > 1:
            ranks = [self.enter_context(closing(rank)) for rank in self._threads.map(meet, range(size))]
        loaded = [load(folder, cpu, no_progress, Sharing(rank, sums)) for rank in ranks]
        self.late: list[asyncio.Future[int]] = []
        self.runners = [Runner(part, P, kv_dtype) for part in loaded]
        self._fed = [runner.add(list(TOKENS)) for runner in self.runners]
        self.fingerprint, self.layout = loaded[0].fingerprint, self.runners[0].layout
        arenas = [DirectIO(store, runner.arena.numpy().data) for runner in self.runners]
        mates = [
            RankTransfer(self.layout, arena, rank_share(shards, rank, size))
            for rank, arena in enumerate(arenas)
        ][1:]
        self.transfer = Transfer(self.layout, arenas[0], shards, mates)
        self.pages = [PageId(page) for page in self._fed[0].pages]
        self.slots = [StateId(self._fed[0].state)] if self.layout.has_states else []

    def run(self, count: int) -> torch.Tensor:
        """Run the next `count` tokens; return the logits after them."""
        return next(self._threads.map(lambda rank: self._run(rank, count), range(self._size)))

    @torch.inference_mode()
    def _run(self, rank: int, count: int) -> torch.Tensor:
        hidden_TH = self.runners[rank].step([(self._fed[rank], count)])
        return self.runners[rank].loaded.model.logits(hidden_TH[-1:])

    @property
    def windows(self) -> list[WindowId]:
        return [WindowId(self._fed[0].windows[place]) for place in self.layout.last_window(NUM_PAGES)]

    async def publish(self) -> bool:
        entries: list[Entry] = []
        for depth, (key, page) in enumerate(zip(KEYS, self.pages, strict=False), 1):
            entries.append(Entry(key, entries[-1] if entries else None, depth, page))
        entries[-1].checkpoint = Checkpoint(tuple(self.slots), tuple(self.windows))
        lease = Lease(P, shared_entries=entries, source=entries[-1])
        return await self.transfer.publish(lease, KEYS, 0, checkpoint=True)

    async def fetch(self) -> int:
        last = self.layout.last_window(NUM_PAGES)
        for runner, fed in zip(self.runners, self._fed, strict=True):
            fed.computed = NUM_PAGES * P
            for place in last:
                fed.windows[place] = runner.free_windows.pop()
        lease = Lease(
            P,
            private_pages=self.pages,
            spare_slots=self.slots,
            windows=self.windows,
            first_window=last.start,
            fetched_windows=last,
        )
        return await self.transfer.fetch(lease, KEYS, NUM_PAGES, self.late.append)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(request.param, **MODELS[request.param])
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("sums", "kv_dtype"),
    [(False, "float32"), (True, "float32"), (False, "fp8"), (False, "fp8_per_token_head")],
)
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 1)])
async def test_prompt_computed_by_one_group_is_continued_by_another(
    folder: Path, cpu: Operators, tmp_path: Path, writers: int, readers: int, *, sums: bool, kv_dtype: KvDtype
) -> None:
    """Compare bits; with ranks that add up, numbers."""
    layers, _ = describe(folder)
    shards = shards_of(layers, {1, writers, readers})
    boundary = NUM_PAGES * P

    store = FileStore(tmp_path, 1 << 30)
    groups = [
        Group(folder, cpu, store, shards, size, sums=sums, kv_dtype=kv_dtype)
        for size in (1, writers, readers)
    ]
    assert len({group.fingerprint for group in groups}) == 1, "their keys would differ"
    cold, prefill, decode = groups
    wanted = cold.run(len(TOKENS))
    prefill.run(boundary)
    assert await prefill.publish()
    assert await decode.fetch() == NUM_PAGES
    found = decode.run(len(TOKENS) - boundary)
    assert torch.equal(found, wanted) != sums
    allowed = ERROR_MAX_LINEAR if decode.layout.has_states else SUMS_ERROR_MAX
    assert float((found - wanted).norm() / wanted.norm()) < allowed
    for group in groups:
        group.close()
    await store.close()
