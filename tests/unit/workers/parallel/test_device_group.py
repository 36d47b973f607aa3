"""A group whose ranks believe that they have a CUDA device each: they build themselves in one order, agree on
their memory, map it together, and answer as one process does."""

import asyncio
import gc
import threading
import time
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY, Mock

import pytest
import torch

from tests.support.kvstore.fake_vmm import FakeVmm
from tests.support.parity.served import answer
from tests.support.workers.late import LateStream
from tests.support.workers.settings import plain_settings
from tests.unit.workers.execution.test_model_runner import Echo, a_row
from tidemill.kernels.dispatch import operators
from tidemill.kvstore.layout import CheckpointId, StateId
from tidemill.kvstore.memory.lease import StateSave
from tidemill.workers.device import HOST
from tidemill.workers.engine.build import BuiltEngine, build_engine
from tidemill.workers.engine.build_rank import build_rank
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.inputs import Caches
from tidemill.workers.parallel.exchange import Exchange
from tidemill.workers.parallel.group import GroupRunner, RankGroup
from tidemill.workers.parallel.link import Ended, StartRanks
from tidemill.workers.parallel.network import Meeting
from tidemill.workers.parallel.overlapped_group import OverlappedGroupRunner, OverlappedRankRunner
from tidemill.workers.parallel.rank import RankParts, carry_out
from tidemill.workers.parallel.rank_runner import RankRunner
from tidemill.workers.parallel.shared_memory import SharedMemory
from tidemill.workers.settings import EngineSettings

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

MIB = 1 << 20
TOTAL = 256 * MIB
FREE = {"leader": 200 * MIB, "rank 1": 150 * MIB}
"""The free memory of each device, by thread."""

RANKS: list[threading.Thread] = []

WORKER = plain_settings(
    device="cuda",
    kv_cache_dtype="float32",
    max_num_seqs=4,
    max_num_batched_tokens=80,
    max_model_len=256,
)
GROUP = replace(WORKER, tensor_parallel_size=2, tensor_parallel_backend="gloo", enforce_eager=True)
REQUEST = Request(
    request_id="1", tokens=tuple(range(9, 80)), max_new_tokens=10, sampling=Sampling(temperature=0)
)


def free_memory(_device: object) -> tuple[int, int]:
    return FREE.get(threading.current_thread().name, FREE["leader"]), TOTAL


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices on the host. Return the runners that warm up."""
    done: list[str] = []
    warm_up = TorchRunner._warm_up

    def warming(runner: TorchRunner, *arguments: int) -> None:
        done.append(type(runner).__name__)
        warm_up(runner, *arguments)

    host = Mock(return_value=torch.device("cpu"))
    reference = Mock(return_value=operators("reference", Path("nowhere")))
    for module in ("device", "engine.build", "engine.build_rank"):
        monkeypatch.setattr(f"tidemill.workers.{module}.device_of", host)
    for module in ("engine.build", "engine.build_rank"):
        monkeypatch.setattr(f"tidemill.workers.{module}.operators_of", reference)
        monkeypatch.setattr(f"tidemill.workers.{module}.memory_in_use", Mock(return_value=0))
    for module in ("engine.build", "engine.runners"):
        monkeypatch.setattr(f"tidemill.workers.{module}.memory_info", free_memory)
    monkeypatch.setattr("tidemill.workers.engine.runners.memory_in_use", Mock(return_value=0))
    monkeypatch.setattr("tidemill.workers.engine.build.memory_name", Mock(return_value="cuda-0"))
    monkeypatch.setattr("tidemill.kvstore.memory.backing._installed_vmm_ops", FakeVmm)
    monkeypatch.setattr(TorchRunner, "compile_ahead", Mock())
    monkeypatch.setattr(TorchRunner, "_warm_up", warming)
    return done


def start_rank(settings: EngineSettings, folder: Meeting) -> Ended:
    def run() -> None:
        try:
            asyncio.run(carry_out(folder, 1, lambda: building(settings, folder)))
        except Exception:  # noqa: BLE001 - the leader reports that it is gone, and this why
            traceback.print_exc()

    RANKS.append(threading.Thread(target=run, daemon=True))
    RANKS[-1].start()
    return lambda: None


def collect_rank() -> None:
    """Collect what a rank leaves open, because its process ends; here it is a thread."""
    RANKS.pop().join()
    gc.collect()


def building(settings: EngineSettings, folder: Meeting) -> RankParts:
    """Build the rank, which is ready later than its leader."""
    threading.current_thread().name = "rank 1"
    parts = build_rank(settings, 1, folder)
    time.sleep(0.5)
    return parts


@asynccontextmanager
async def running(built: BuiltEngine) -> AsyncGenerator[None]:
    loop = asyncio.create_task(built.engine.run())
    try:
        yield
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop


async def tokens_of(built: BuiltEngine) -> list[int]:
    async with running(built):
        tokens, _ = await answer(built, REQUEST)
        return tokens


def test_ranks_with_a_device_each_are_one_worker(devices: list[str]) -> None:
    alone = build_engine(replace(WORKER, enforce_eager=True), lambda _done, _total: None)
    wanted = asyncio.run(tokens_of(alone))
    alone.close()
    devices.clear()
    group = build_engine(GROUP, lambda _done, _total: None, StartRanks(start_rank))
    try:
        tried, beside_arena = devices[:2], devices[2:]
        assert tried == ["TorchRunner"] * 2, "both ranks try their largest step"
        assert sorted(beside_arena) == ["GroupRunner", "RankRunner"]
        least = 2 * int(FREE["rank 1"] * 0.9)  # without the arena of the trial
        assert abs(group.info.memory_bytes - least) < 16 * MIB, "twice what the fuller device has left"
        assert asyncio.run(tokens_of(group)) == wanted
    finally:
        group.close()
        del group
        collect_rank()


def test_ranks_launch_ahead_and_no_host_reads_a_token(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices answer late, so a token that a host took would be of an earlier step. A request that needs the
    leader's host runs in steps of their own, and those after it go ahead again."""
    streams: list[LateStream] = []
    read: list[torch.dtype] = []
    broadcast = SharedMemory.broadcast

    def late(_stream: object) -> LateStream:
        streams.append(LateStream())
        return streams[-1]

    def counted(exchange: SharedMemory, x: torch.Tensor) -> None:
        read.append(x.dtype)
        broadcast(exchange, x)

    async def main(group: BuiltEngine, wanted: list[int]) -> None:
        async with running(group):
            assert await answer(group, REQUEST) == (wanted, ANY)
            assert torch.int64 not in read, "a token through host memory"
            before = [stream.overlapped for stream in streams[-2:]]
            assert min(before) > 5
            hosted = replace(
                REQUEST, request_id="2", sampling=Sampling(temperature=0, logprobs=0), max_new_tokens=3
            )
            found = [answer(group, hosted), answer(group, replace(REQUEST, request_id="3"))]
            assert [tokens for tokens, _ in await asyncio.gather(*found)] == [wanted[:3], wanted]
            assert torch.int64 in read
            assert all(stream.overlapped > count for stream, count in zip(streams[-2:], before, strict=True))

    alone = build_engine(replace(WORKER, enforce_eager=True), lambda _done, _total: None)
    wanted = asyncio.run(tokens_of(alone))
    alone.close()
    monkeypatch.setattr("tidemill.workers.engine.runners.CudaStream", late)
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(SharedMemory, "broadcast", counted)
    group = build_engine(
        replace(GROUP, async_scheduling=True), lambda _done, _total: None, StartRanks(start_rank)
    )
    try:
        assert sorted(devices[-2:]) == ["OverlappedGroupRunner", "OverlappedRankRunner"]
        asyncio.run(main(group, wanted))
    finally:
        group.close()
        del group
        collect_rank()
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_step_without_draws_ends_when_every_rank_has_copied_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """A transfer on a rank waits for no step there: it may start when the step of the leader ends."""
    states, copies = torch.arange(4.0).view(4, 1), torch.full((2, 4, 1), -1.0)
    caches = [Caches((), (states,), (), saved=(copy,)) for copy in copies]
    save = Caches.save

    def saving(own: Caches, *pairs: torch.Tensor) -> None:
        time.sleep(0.2 if own is caches[1] else 0)
        save(own, *pairs)

    monkeypatch.setattr(Caches, "save", saving)
    streams = [LateStream(), LateStream()]
    step = (a_row("a", (1, 2), 0)._replace(saves=(StateSave(StateId(2), CheckpointId(1)),)),)
    model = Mock(ops=Echo.ops, forward=Mock(return_value=torch.zeros(2, 1)))

    def run(rank: int) -> None:
        with closing(SharedMemory(tmp_path, rank, 2, 5.0)) as control:
            exchange, running = Exchange(control, control), (model, caches[rank], 4, 1)
            late = streams[rank], None, PageTables(2, 6, windows=False)
            if rank and ahead:
                runner = OverlappedRankRunner(exchange, *running, *late)
            elif rank:
                runner = RankRunner(exchange, *running, HOST, None)
            elif ahead:
                runner = OverlappedGroupRunner(RankGroup(Mock(), exchange, HOST), 99, *running, *late)
            else:
                runner = GroupRunner(RankGroup(Mock(), exchange, HOST), 99, *running, HOST)
            if rank:
                runner.run_now(step)
                streams[1].close()
            else:
                asyncio.run(landed(runner))
                assert copies[:, 1].flatten().tolist() == [2.0, 2.0]
            runner.close()

    async def landed(leader: TorchRunner) -> None:
        await leader.run(step)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    streams[0].close()


def test_memory_of_ranks_is_the_least_however_late_one_comes(tmp_path: Path) -> None:
    found: dict[int, int] = {}

    def run(rank: int) -> None:
        control = SharedMemory(tmp_path, rank, 3, 1.0)
        if rank == 2:
            threading.Event().wait(1.5)  # longer than a rank may delay a step
        found[rank] = Exchange(control, control).least((50, 30, 70)[rank])
        control.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 30, 1: 30, 2: 30}
