"""Both halves of the connector over a real folder: a second engine loads what a first one has saved."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tidemill.connect import worker_side
from tidemill.connect.blocks import GroupMemory
from tidemill.connect.groups import BlockMove, Group, Groups
from tidemill.connect.scheduler_side import SchedulerSide, moves_of_step
from tidemill.connect.store_thread import StoreThread
from tidemill.connect.worker_side import Loaded, WorkerSide
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import Kind, Namespace, ObjectKey, PageKey
from tidemill.kvstore.stores.page_store import Got, Objects

BLOCK_TOKENS = 4
BLOCKS = 16
DENSE = Groups((Group(Kind.PAGE),), BLOCK_TOKENS, ranks=1)
HYBRID = Groups((Group(Kind.PAGE), Group(Kind.CHECKPOINT)), BLOCK_TOKENS, ranks=1)
WAIT_S = 20.0


@dataclass
class Request:
    """The part of vLLM's Request that the scheduler side reads."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: object = None
    prompt_embeds: object = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    mm_features: list[object] = field(default_factory=list[object])

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request_of(tokens: int, name: str = "one", *, seed: int = 0, **fields: Any) -> Request:  # noqa: ANN401
    return Request(name, [seed + token for token in range(tokens)], tokens, **fields)


def root(salt: str) -> PageKey:
    return Namespace(model="m", layout="l", salt=salt).root()


@dataclass
class Engine:
    """Both sides of an engine with one rank, and its KV caches."""

    scheduler: SchedulerSide
    worker: WorkerSide
    caches: list[Tensor]  # one layer for each group
    asked: set[str] = field(default_factory=set[str])

    def matched(self, request: Request, computed: int = 0) -> int:
        until_s = monotonic() + WAIT_S
        while (tokens := self.scheduler.match(request, computed)) is None:
            assert monotonic() < until_s
            sleep(0.001)
        return tokens

    def compute(
        self,
        request: Request,
        table: Sequence[Sequence[int]],
        tokens: int,
        states: Sequence[tuple[int, int, int]] = (),
        drafts: Sequence[int] = (),
    ) -> list[list[BlockMove]]:
        """Run a step of one request, which vLLM offers to the connector before its first."""
        if request.request_id not in self.asked:
            self.asked.add(request.request_id)
            self.scheduler.match(request, request.num_computed_tokens)
        offloads = {request.request_id: list(states)}
        state = SimpleNamespace(
            get_block_ids={request.request_id: table}.get, boundary_state_offloads=offloads
        )
        scheduled = {request.request_id: tokens + len(drafts)}
        saves = moves_of_step(self.scheduler, scheduled, {request.request_id: drafts}, state)
        request.num_computed_tokens += tokens
        self.worker.save(saves)
        return saves

    def settle(self) -> None:
        """Wait until all saves have ended."""
        until_s = monotonic() + WAIT_S
        while not all(put.done() for put in self.worker._saving):
            assert monotonic() < until_s
            sleep(0.001)

    def counts(self) -> dict[str, int]:
        """Return what is new; the store counts with the call before."""
        self.worker._store.stats()
        self.worker._store.contains([]).result(WAIT_S)
        return self.worker.take_counts()

    def load(self, request: Request, table: Sequence[Sequence[int]], external: int) -> Loaded:
        self.scheduler.admit(request, table, external)
        self.worker.load(self.scheduler.take_loads())
        until_s = monotonic() + WAIT_S
        while not (loaded := self.worker.take_loaded()).ended:
            assert monotonic() < until_s
            sleep(0.001)
        return loaded


@contextmanager
def engine(folder: Path, groups: Groups = DENSE, *, fill: int = 0, **settings: bool) -> Generator[Engine]:
    with ExitStack() as stack:
        stores = [StoreThread(f"file://{folder}?size=64MiB", None) for _ in range(2)]
        for store in stores:
            stack.callback(store.close)
        caches = [
            torch.full((BLOCKS, 2, BLOCK_TOKENS, 8 << group), fill) for group, _ in enumerate(groups.groups)
        ]
        for cache in caches if fill else []:
            cache.copy_(torch.arange(cache.numel()).view(cache.shape))
        chosen = {"loads": True, "saves": True, "only_prompts": False, **settings}
        scheduler = SchedulerSide(groups, root, stores[0], **chosen)
        memories = [GroupMemory([cache], BLOCKS) for cache in caches]
        yield Engine(scheduler, WorkerSide(groups, 0, stores[1], memories), caches)


def save(folder: Path, groups: Groups = DENSE, tokens: int = 14) -> list[Tensor]:
    """Save the three full blocks of a prompt, of blocks 1, 2 and 3 in each group; return the caches."""
    states = [(1, 3, 12)] if groups is HYBRID else []
    with engine(folder, groups, fill=1) as first:
        first.compute(request_of(tokens), [[1, 2, 3, 4]] * len(groups.groups), tokens, states)
        first.settle()
        assert first.counts()["objects save stored"] == 3 + len(states)
        return first.caches


def test_a_second_engine_loads_the_full_blocks(tmp_path: Path) -> None:
    [saved] = save(tmp_path)
    with engine(tmp_path) as second:
        request = request_of(14)
        assert second.matched(request) == 12
        assert second.load(request, [[9, 8, 7, 6]], 12) == Loaded({"one"}, set(), set())
        [cache] = second.caches
        assert torch.equal(cache[[9, 8, 7]], saved[[1, 2, 3]])
        assert not cache[[*range(7), *range(10, BLOCKS)]].any()
        counts = second.counts()
        assert counts["objects load hit"] == 3
        assert counts["loads whole"] == 1
        assert counts["bytes load"] == 3 * saved[0].nbytes
        assert second.counts() == {}
        assert second.matched(request) == 12, "it may be preempted"


def test_a_question_is_not_answered_before_the_store_is(tmp_path: Path) -> None:
    save(tmp_path)
    with engine(tmp_path) as second:
        busy = Event()
        second.scheduler._store._loop.call_soon_threadsafe(busy.wait)
        assert second.scheduler.match(request_of(14, "0"), 0) is None
        busy.set()
        assert second.matched(request_of(14, "0")) == 12


@pytest.mark.parametrize(
    ("request_", "computed", "expected"),
    [
        (request_of(14), 4, 8),
        (request_of(14), 12, 0),
        (request_of(12), 0, 8),  # the last token is computed
        (request_of(4), 0, 0),
        (request_of(14, seed=1), 0, 0),
        (request_of(14, cache_salt="other"), 0, 0),
        (request_of(14, lora_request="adapter"), 0, 0),
        (request_of(14, mm_features=["picture"]), 0, 0),
        (request_of(14, prompt_embeds="embeddings"), 0, 0),
        (request_of(14, resumable=True), 0, 0),
        (request_of(14, skip_reading_prefix_cache=True), 0, 0),
    ],
)
def test_tokens_that_match(tmp_path: Path, request_: Request, computed: int, expected: int) -> None:
    save(tmp_path)
    with engine(tmp_path) as second:
        assert second.matched(request_, computed) == expected


def test_a_load_begins_behind_what_the_engine_holds(tmp_path: Path) -> None:
    [saved] = save(tmp_path)
    with engine(tmp_path) as second:
        request = request_of(14)
        assert second.matched(request, 4) == 8
        assert second.load(request, [[5, 9, 8, 7]], 8).failed == set()
        assert torch.equal(second.caches[0][[9, 8]], saved[[2, 3]])
        assert not second.caches[0][5].any()


def objects_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "objects").rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["corrupt", "gone"])
def test_a_load_that_fails_names_the_blocks(tmp_path: Path, damage: str) -> None:
    save(tmp_path)
    with engine(tmp_path) as second:
        request = request_of(14)
        assert second.matched(request) == 12
        for path in objects_of(tmp_path):
            if damage == "gone":
                path.unlink()
            else:
                path.chmod(0o600)
                path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        loaded = second.load(request, [[9, 8, 7, 6]], 12)
        assert loaded == Loaded({"one"}, {"one"}, {9, 8, 7})
        assert not second.caches[0].any()
        counts = second.counts()
        assert counts["loads failed"] == 1
        assert counts[f"objects load {'corrupt' if damage == 'corrupt' else 'miss'}"] == 3
        save(tmp_path)
        second.scheduler.compute(loaded.failed)
        assert second.matched(request) == 0


def test_one_lost_block_leaves_the_others(tmp_path: Path) -> None:
    [saved] = save(tmp_path)
    with engine(tmp_path) as second:
        request = request_of(14)
        assert second.matched(request) == 12
        objects_of(tmp_path)[1].unlink()
        loaded = second.load(request, [[9, 8, 7, 6]], 12)
        [lost] = loaded.missing_blocks
        good = [block for block in (9, 8, 7) if block != lost]
        assert torch.equal(second.caches[0][good], saved[[10 - block for block in good]])


def test_a_hybrid_is_restored_where_a_state_is(tmp_path: Path) -> None:
    pages, states = save(tmp_path, HYBRID)
    with engine(tmp_path, HYBRID) as second:
        assert second.matched(request_of(12, "before")) == 0, "a state at 12 is no state at 8"
        request = request_of(14)
        assert second.matched(request) == 12
        assert second.load(request, [[9, 8, 7, 6], [0, 0, 5, 4]], 12).failed == set()
        assert torch.equal(second.caches[0][[9, 8, 7]], pages[[1, 2, 3]])
        assert torch.equal(second.caches[1][5], states[3])
        assert not second.caches[1][[*range(5), *range(6, BLOCKS)]].any()


def test_states_inside_a_block_are_not_saved(tmp_path: Path) -> None:
    with engine(tmp_path, HYBRID, fill=1) as first:
        table = [[1, 2, 3, 4]] * 2
        [moves] = first.compute(request_of(14), table, 14, [(1, 3, 10), (1, 7, 8)])
        keys = [move.key for move in moves if move.group == 0]
        assert [move for move in moves if move.group] == [BlockMove(1, keys[1], 7)]


def test_blocks_are_saved_once_and_when_they_are_full(tmp_path: Path) -> None:
    with engine(tmp_path, fill=1) as first:
        request = request_of(10)
        table = [[1, 2, 3, 4]]
        saved = [
            [move.block for moves in first.compute(request, table, tokens) for move in moves]
            for tokens in (6, 4)
        ]
        request.all_token_ids += [77, 78, 79]
        saved += [
            [move.block for moves in first.compute(request, table, 1) for move in moves] for _ in range(3)
        ]
        assert saved == [[1], [2], [], [3], []]


def test_unknown_and_drafted_tokens_are_not_saved(tmp_path: Path) -> None:
    with engine(tmp_path, fill=1) as first:
        request = request_of(7)
        assert len(first.compute(request, [[1, 2, 3]], 7)[0]) == 1
        assert first.compute(request, [[1, 2, 3]], 1) == [], "the token that fills the block is still drawn"
        request.all_token_ids += [77, 78]
        [[move]] = first.compute(request, [[1, 2, 3]], 1, drafts=[5, 5, 5])
        assert move.block == 2


def test_with_drafts_prompts_alone_are_saved(tmp_path: Path) -> None:
    with engine(tmp_path, fill=1, only_prompts=True) as first:
        request = request_of(7)
        first.compute(request, [[1, 2, 3]], 7)
        request.all_token_ids += [77, 78]
        assert first.compute(request, [[1, 2, 3]], 2) == []


def test_what_was_computed_before_is_not_saved_again(tmp_path: Path) -> None:
    with engine(tmp_path, fill=1) as first:
        [[move]] = first.compute(request_of(9, num_computed_tokens=4), [[1, 2, 3]], 5)
        assert move.block == 2


@pytest.mark.parametrize("role", ["loads", "saves"])
def test_a_role_does_its_half(tmp_path: Path, role: str) -> None:
    save(tmp_path)
    with engine(tmp_path, loads=role != "loads", saves=role != "saves") as second:
        assert (second.matched(request_of(14)) == 0) == (role == "loads")
        assert (second.compute(request_of(14), [[1, 2, 3, 4]], 14) == []) == (role == "saves")


def test_requests_of_old_weights_save_nothing_more(tmp_path: Path) -> None:
    with engine(tmp_path, fill=1) as first:
        request = request_of(10)
        first.compute(request, [[1, 2, 3]], 4)
        first.scheduler.forget_all()
        assert first.compute(request, [[1, 2, 3]], 6) == []


def test_saves_that_the_store_does_not_take_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "SAVING_BYTES_MAX", 1)
    with engine(tmp_path, fill=1) as first:
        first.compute(request_of(14), [[1, 2, 3, 4]], 14)
        assert first.counts() == {"unsaved_blocks": 3}


def test_a_store_of_one_process_is_refused() -> None:
    with pytest.raises(StoreError, match="no other server sees it"):
        StoreThread("memory:", None)


class Late:
    """A store whose gets end when the test lets them."""

    def __init__(self) -> None:
        self.ends = Event()

    async def get(self, wanted: Objects) -> list[Got]:
        await asyncio.to_thread(self.ends.wait)
        return [Got.HIT] * len(wanted)

    def patience_s(self, num_bytes: int) -> float:
        return num_bytes / 1e3


def test_a_late_store_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, late = StoreThread(f"file://{tmp_path}?size=64MiB", None), Late()
    with monkeypatch.context() as patch:
        patch.setattr(store, "_store", late)
        key = ObjectKey(Kind.PAGE, root(""))
        asked = store.get([(key, memoryview(bytearray(8)))])
        try:
            assert asked.result(WAIT_S) == [Got.UNREACHABLE]
        finally:
            late.ends.set()
    store.close()


def test_scheduler_counts_the_trips_of_its_own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path) as made:
        store = made.scheduler._store
        assert made.scheduler.take_counts() == {}
        stats = replace(store.stats(), trips=2)
        monkeypatch.setattr(store, "stats", lambda: stats)
        assert made.scheduler.take_counts() == {"trips": 2}
        assert made.scheduler.take_counts() == {}
