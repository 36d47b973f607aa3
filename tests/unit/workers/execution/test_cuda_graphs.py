"""Decode steps in graphs: their sizes, their padding, what runs without them. See tests/gpu for a device."""

import asyncio
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import answer, serving
from tests.support.workers.late import LateStream
from tests.support.workers.padded import CPU, ROWS_MAX, TABLE_WIDTH, Bed, again, check_padding
from tests.support.workers.settings import plain_settings
from tidemill.kernels.dispatch import REFERENCE, operators
from tidemill.workers.engine import build
from tidemill.workers.engine.memory_plan import Memory
from tidemill.workers.execution.cuda_graphs import (
    CHUNK,
    Graphs,
    GraphShape,
    Replay,
    buckets,
    choose,
    graph_shapes,
    pad,
    padding,
    shapes,
)
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.overlapped_runner import OverlappedRunner
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.registry import LoadedModel
from tidemill.workers.models.inputs import ALIGNED_BYTES, Inputs, caches_of, one_run
from tidemill.workers.settings import EngineSettings

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model("qwen3_next/moe-two-values"), tmp_path_factory.mktemp("model"))


@PROPERTY
@given(st.integers(1, 1000))
def test_sizes_reach_every_number_of_rows_with_little_padding(rows_max: int) -> None:
    sizes = buckets(rows_max)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == rows_max
    for rows in range(1, rows_max + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(rows, 8) if rows <= 64 else size - rows < 16


@PROPERTY
@given(rows=st.integers(0, 9), width=st.integers(0, 5))
def test_one_run_has_a_place_for_each_number_and_no_two_for_one(rows: int, width: int) -> None:
    like = padding(rows, width)
    memory, views = one_run(like)
    memory.fill_(7)
    for count, field in enumerate(fields(Inputs)):
        view, wanted = getattr(views, field.name), getattr(like, field.name)
        assert (view.shape, view.dtype) == (wanted.shape, wanted.dtype)
        assert (view.data_ptr() - memory.data_ptr()) % ALIGNED_BYTES == 0
        assert not view.numel() or bool((view.view(torch.uint8) == 7).all()), "another one wrote here"
        view.fill_(count)
    for count, field in enumerate(fields(Inputs)):
        assert bool((getattr(views, field.name) == count).all())


def test_unused_rows_are_padded_over_earlier_content() -> None:
    whole, three, one = padding(4, 3, windows=True), full(3, 3, windows=True), full(1, 2, windows=True)
    pad(three, whole)
    pad(one, whole)
    empty = padding(4, 3)
    for name in ("tokens_T", "positions_T", "lens_B", "read_B", "writes_BK"):
        assert torch.equal(getattr(whole, name)[:1], getattr(one, name)), name
        assert torch.equal(getattr(whole, name)[1:], getattr(empty, name)[1:]), name
    assert torch.equal(whole.cu_B1, empty.cu_B1)
    assert whole.pages_BN[0, :2].tolist() == whole.windows_BN[0, :2].tolist() == [5, 5]


def full(rows: int, width: int, tokens: int = 1, kept: int = 1, *, windows: bool = False) -> Inputs:
    return Inputs(
        tokens_T=torch.full((rows * tokens,), 5),
        positions_T=torch.full((rows * tokens,), 5),
        cu_B1=torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32),
        pages_BN=torch.full((rows, width), 5, dtype=torch.int32),
        windows_BN=torch.full((rows, width * windows), 5, dtype=torch.int32),
        lens_B=torch.full((rows,), 5, dtype=torch.int32),
        read_B=torch.full((rows,), 5, dtype=torch.int32),
        writes_BK=torch.full((rows, kept), 5, dtype=torch.int32),
    )


def test_other_steps_run_without_graphs() -> None:
    seen: list[int] = []

    def forward(inputs: Inputs) -> torch.Tensor:
        seen.append(len(inputs.tokens_T))
        return inputs.tokens_T[:, None].float()

    graphs = Graphs(forward, graph_shapes(6, 22, 1), 4, CPU, again)
    assert seen == [22, 12, 8, 6, 4, 4, 2, 2, 1], "the largest first"
    for step in (full(7, 1), full(2, 5), full(2, 1, tokens=10), full(2, 1, kept=18)):
        assert graphs.forward(step) is None
    assert len(seen) == 9
    for step, size in ((full(3, 4), 4), (full(2, 4, tokens=2, kept=2), 4), (full(2, 4, tokens=8), 22)):
        hidden_TH = graphs.forward(step)
        assert hidden_TH is not None
        assert hidden_TH.tolist() == [[5.0]] * len(step.tokens_T)
        assert seen[-1] == size


@PROPERTY
@given(rows=st.integers(1, 40), more=st.integers(0, 600), drafts_max=st.integers(0, 4), data=st.data())
def test_chosen_graph_has_room_for_the_step(
    rows: int, more: int, drafts_max: int, data: st.DataObject
) -> None:
    """Padding fills it: each padding row has a token, and there is a row for the tokens that are left."""
    rows_max = data.draw(st.integers(rows, 64))
    shapes = graph_shapes(rows_max, data.draw(st.integers(rows_max, 700)), drafts_max)
    shape = choose(shapes, rows, rows + more, 1)
    if shape is None:
        assert more > max((size.tokens - rows_max for size in shapes if size.rows > rows_max), default=0)
        return
    assert (shape.rows == shape.tokens) == (more == 0), "one token per row has its own graphs"
    step = full(rows, 1)
    cu = torch.tensor([0, *range(1 + more, rows + more + 1)], dtype=torch.int32)
    step = replace(step, tokens_T=torch.zeros(rows + more), positions_T=torch.zeros(rows + more), cu_B1=cu)
    into = padding(shape.rows, 1, shape.tokens - shape.rows + 1, states=shape.states)
    pad(step, into)
    assert torch.equal(into.cu_B1[: rows + 1], cu)
    assert int(into.cu_B1[-1]) == shape.tokens
    assert bool((into.cu_B1.diff() > 0).all())
    assert not into.lens_B[rows:].any()
    assert bool((into.writes_BK[:, :-1] == -1).all())


@PROPERTY
@given(rows_max=st.integers(1, 1100), tokens_max=st.integers(2, 9000))
def test_warming_up_stays_within_the_largest_step_and_reaches_it(rows_max: int, tokens_max: int) -> None:
    made = shapes(rows_max, tokens_max)
    assert all(rows <= rows_max and rows - 1 + first <= tokens_max for rows, first, _ in made)
    assert (1, tokens_max, 1) in made
    assert (rows_max, 1, 1) in made or rows_max > tokens_max
    assert {states for _, _, states in made} == {1, 2} or tokens_max < CHUNK
    assert len(made) < 40


def test_warming_up_touches_no_memory(folder: Path) -> None:
    bed = Bed(folder, REFERENCE, (5, 20))
    before = bed.memory()
    runner = TorchRunner(bed.model, bed.caches, 16, threads=1)
    runner.warm_up(rows_max=3, tokens_max=70, table_width=2, drafts_max=2)
    runner.close()
    assert all(torch.equal(bits, old) for bits, old in zip(bed.memory(), before, strict=True))


def test_padding_changes_no_bit_on_cpu(folder: Path, kernel_cache: Path) -> None:
    check_padding(folder, operators("cpu", kernel_cache), torch.equal)


def counted(graphs: Graphs, replays: list[GraphShape]) -> None:
    for shape, graph in graphs._graphs.items():

        def again_counted(shape: GraphShape = shape, replay: Replay = graph.replay) -> None:
            replays.append(shape)
            replay()

        graphs._graphs[shape] = replace(graph, replay=again_counted)


@pytest.mark.parametrize(
    ("late", "graphs", "drafts_max"), [(False, True, 0), (False, True, 3), (True, False, 0), (True, True, 0)]
)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_engine_answers_the_same_with_graphs_and_on_a_late_device(
    kernel_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    late: bool,
    graphs: bool,
    drafts_max: int,
    penalty: float,
) -> None:
    made = plain_settings(
        memory_bytes=64 << 20,
        cache_folder=kernel_cache,
        page_size=16,
        max_num_seqs=ROWS_MAX,
        max_model_len=16 * TABLE_WIDTH,
        num_speculative_tokens=drafts_max,
    )
    asked = [
        Request(
            request_id=str(number),
            tokens=tuple(range(3, 4 + 13 * number)),
            max_new_tokens=30 + number,
            sampling=Sampling(
                temperature=0.8 * (number % 2), seed=number, repetition_penalty=penalty if number % 3 else 1.0
            ),
        )
        for number in range(6)
    ]

    async def answers() -> list[list[int]]:
        async with serving(made) as built:
            found = await asyncio.gather(*(answer(built, request) for request in asked))
            return [tokens for tokens, _ in found]

    wanted = asyncio.run(answers())
    replays: list[GraphShape] = []
    streams: list[LateStream] = []
    open_runner = build.open_runner

    def opened(
        settings: EngineSettings, loaded: LoadedModel, memory: Memory, arena: torch.Tensor, group: None
    ) -> TorchRunner:
        runner = open_runner(settings, loaded, memory, arena, group)
        if late:
            streams.append(LateStream())
            tables, caches = PageTables(ROWS_MAX, TABLE_WIDTH, windows=False), caches_of(memory.layout, arena)
            runner = OverlappedRunner(loaded.model, caches, 16, settings.threads, streams[0], None, tables)
        if graphs:
            runner.use_graphs(graph_shapes(ROWS_MAX, 200, drafts_max), TABLE_WIDTH, again)
            assert isinstance(runner._graphs, Graphs)
            counted(runner._graphs, replays)
        return runner

    monkeypatch.setattr(build, "open_runner", opened)
    assert asyncio.run(answers()) == wanted
    assert not graphs or len(set(replays)) > 1
    assert not graphs or any(shape.tokens > shape.rows for shape in replays), "a tail or guesses"
    for stream in streams:
        assert stream.overlapped or penalty > 1
        stream.close()
