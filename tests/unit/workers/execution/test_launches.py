"""Launches of released models' steps on a device, checked without one: a capture meets nothing that it
refuses, and the warm-up meets every kernel of later steps."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.engine.released import RELEASED
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernels.launched import META, Counted, Launch, capturing, launching
from tests.support.workers.released import LAYERS, PAGE_TOKENS, released, there
from tests.unit.workers.execution.test_model_runner import a_row
from tidemill.kernels.attention.lists import PROGRAMS
from tidemill.kernels.dispatch import operators
from tidemill.kernels.draw.cuda import BLOCK
from tidemill.kernels.linear.stored import CodeKind
from tidemill.kvstore.layout import PageId, WindowId
from tidemill.workers.execution import model_runner as runner_module
from tidemill.workers.execution.cuda_graphs import (
    Forward,
    Graphs,
    GraphShape,
    Replay,
    graph_shapes,
    padding,
)
from tidemill.workers.execution.grammar import Grammars, Matcher
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.overlapped_runner import OverlappedRunner, StepEvent
from tidemill.workers.execution.sampler import Sampler, Wanted
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Step
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.messages import Grammar, Request, Sampling
from tidemill.workers.models.inputs import Kept
from tidemill.workers.sources.names import bundled

ROWS_MAX = 600
TOKENS_MAX = 8192
TABLE_WIDTH = 640
DRAFTS_MAX = 5
VOCABULARY = 151_936
BOX_MAX = 256  # elements of one dimension of a tile, what cuTensorMapEncodeTiled takes
STRIDE_BYTES_MAX = 1 << 40
STEP_LAUNCHES = 11
"""Embedding, angles, the first norm and the lists of attention, whatever the number of layers."""


def captured(run: Forward) -> tuple[Replay, torch.Tensor]:
    run()
    with capturing():
        return lambda: None, run()


@pytest.mark.parametrize("name", RELEASED)
def test_graph_captures_work_that_reads_nothing_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches = released(name)
    with launching(monkeypatch) as launches, torch.inference_mode():
        Graphs(
            lambda inputs: model.forward(inputs, caches),
            graph_shapes(8, 600, 3),
            9,
            META,
            captured,
            windows=caches.has_windows,
        )
    assert len(launches) > 2 * len(graph_shapes(8, 600, 3)) * LAYERS


@pytest.mark.parametrize("name", RELEASED)
def test_driver_accepts_all_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the largest step, and one row of one token after a long text."""
    model, caches = released(name)
    with launching(monkeypatch) as launches, torch.inference_mode():
        for rows, first in ((1, 1), (ROWS_MAX, 1), (1, TOKENS_MAX), (ROWS_MAX, TOKENS_MAX - ROWS_MAX)):
            empty = padding(rows, TABLE_WIDTH, first, windows=caches.has_windows)
            model.forward(there(empty, META), caches)
    for launch in launches:
        x, *others = launch.grid
        assert 0 < x < 1 << 31, launch
        assert all(0 < size < 1 << 16 for size in others), launch
        for tile in launch.tiles:
            size = tile.base.element_size()
            assert 1 <= len(tile.shape) <= 5, launch
            assert all(0 < box <= BOX_MAX or at == 4 for at, box in enumerate(tile.block_shape)), launch
            assert tile.strides[-1] == 1, launch
            for stride in tile.strides[:-1]:
                assert stride * size % 16 == 0, launch
                assert 0 < stride * size < STRIDE_BYTES_MAX, launch
            for at in range(len(tile.shape) - 1):
                assert tile.strides[at] % tile.strides[at + 1] == 0, launch
                assert tile.strides[at] >= tile.strides[at + 1] * tile.shape[at + 1], launch


LAUNCHES_PER_LAYER = {
    ("Qwen3-Next-80B-A3B", 1): 12,
    ("Qwen3-Next-80B-A3B", 32): 12,
    ("Qwen3-Next-80B-A3B", 128): 13,
    ("Qwen3-30B-A3B", 32): 13,
    ("gpt-oss-120b", 32): 12,
}


@pytest.mark.parametrize(("name", "rows"), LAUNCHES_PER_LAYER)
def test_decode_step_has_few_launches(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches = released(name)
    with launching(monkeypatch) as launches, torch.no_grad(), Counted() as counted:
        step = there(padding(rows, TABLE_WIDTH, windows=caches.has_windows), META)
        launches.clear()
        counted.count = 0
        model.forward(step, caches)
    assert (len(launches) + counted.count) / LAYERS <= LAUNCHES_PER_LAYER[name, rows] + STEP_LAUNCHES / LAYERS


IN_LISTS = {"attend_span", "attend_rows", "add_short"}


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        (GraphShape(256, 256), 0),
        (GraphShape(257, 272), 160),  # of windows, where the tail of a prompt may be in rows of two tokens
        (GraphShape(257, 768), 480),
        (GraphShape(256, 8192), 4700),  # 8,192 tokens of 8 or 16 query vectors in tiles of 128
    ],
)
@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3-30B-A3B", "gpt-oss-20b"])
def test_programs_of_attention_are_those_that_have_work(
    name: str, shape: GraphShape, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables have 262,144 tokens, and a grid of all their spans would have 65,536 programs."""
    model, caches = released(name)
    with launching(monkeypatch) as launches, torch.inference_mode():
        first = shape.tokens - shape.rows + 1
        step = padding(shape.rows, (1 << 18) // PAGE_TOKENS, first, windows=caches.has_windows)
        model.forward(there(step, META), caches)
    kernels = [launch.kernel for launch in launches]
    assert kernels.count("list_entries") == 1 + caches.has_windows  # for all layers
    assert IN_LISTS & set(kernels)
    for launch in launches:
        if launch.kernel in IN_LISTS:
            assert launch.grid[0] <= -(-PROGRAMS // launch.grid[1]), launch
        if launch.kernel == "attend_tile":
            assert launch.grid[0] <= tiles, launch


def test_chunk_of_a_prompt_behind_a_long_text_fills_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles are 64 of 128 query vectors, all heads together."""
    model, caches = released("Qwen3-Next-80B-A3B")
    with launching(monkeypatch) as launches, torch.inference_mode():
        model.forward(there(padding(1, (1 << 17) // PAGE_TOKENS, 512), META), caches)
    grids = [launch.grid for launch in launches if launch.kernel == "attend_rows"]
    assert grids
    assert all(programs * heads >= 2 * 132 for programs, heads in grids)


class _Products(TorchDispatchMode):
    """Collects the types of what products multiply, and the number of those of each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[torch.dtype, ...]] = set()
        self.rows = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func.overloadpacket.__name__ in {"mm", "addmm", "bmm"}:
            factors = [part for part in args if isinstance(part, torch.Tensor)][-2:]
            self.dtypes.add(tuple(part.dtype for part in factors))
            self.rows[factors[0].shape[-2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_no_product_of_a_step_is_of_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix units take none, and products of bfloat16 are exact in the float32 of their sums."""
    model, caches = released(name)
    with launching(monkeypatch), torch.no_grad(), _Products() as products:
        model.logits(model.forward(there(padding(32, 9), META), caches))
    assert products.dtypes == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "gpt-oss-20b", "DeepSeek-V3"])
def test_last_layer_of_a_prompt_computes_its_last_token_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It projects what goes into pages of the others."""
    model, caches = released(name)
    tables = PageTables(2, TABLE_WIDTH, windows=caches.has_windows)
    monkeypatch.setattr(runner_module, "on_device", there)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # in it, modes see composed operators
    pages = tuple(map(PageId, range(9)))
    windows = tuple(map(WindowId, range(9))) if caches.has_windows else ()
    prompt = a_row("", (5,) * 300, 0, drawing_state(SAMPLINGS["greedy"]))._replace(
        pages=pages, windows=windows
    )
    for runner in (
        TorchRunner(model, caches, PAGE_TOKENS, 1, META),
        OverlappedRunner(model, caches, PAGE_TOKENS, 1, MetaStream(), None, tables),
    ):
        with launching(monkeypatch) as launches, torch.no_grad(), Counted(), _Products() as products:
            if isinstance(runner, OverlappedRunner):
                runner._launch_ahead((prompt,))
            else:
                runner._outputs((prompt,), [5] * 300)
        runner.close()
        assert products.rows[1] >= 3, "back from attention, to the scores of experts, the head"
        assert [launch.grid[0] for launch in launches if launch.kernel == "choose"][-1] == 1


STEPS = [
    (rows, more, (1, 2, 5, 1 + more)[(at + index) % 4] if more else 1, (1, 17, TABLE_WIDTH)[(at + index) % 3])
    for at, rows in enumerate((1, 3, 300, ROWS_MAX))
    for index, more in enumerate((0, 1, 15, 16, 300, 1500, 3000, TOKENS_MAX - ROWS_MAX))
]
"""Rows, tokens beyond one each, states that a row may keep, pages of a table."""


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("Qwen3-Next-80B-A3B", None),
        ("granite-4.0-h-small", None),
        ("gpt-oss-20b", None),
        ("DeepSeek-V3", None),
        ("Qwen3-Next-80B-A3B", "int4"),
        ("DeepSeek-V3", "fp8"),
    ],
)
def test_no_step_compiles(name: str, codes: CodeKind | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stop all requests for seconds."""
    model, caches = released(name, kind=codes)
    monkeypatch.setattr(runner_module, "on_device", there)
    runner = TorchRunner(model, caches, PAGE_TOKENS, 1, META)
    with launching(monkeypatch) as launches:
        runner.warm_up(ROWS_MAX, TOKENS_MAX, TABLE_WIDTH, DRAFTS_MAX)
        known = compiled(launches)
        for rows, more, states, width in STEPS:
            launches.clear()
            step = padding(rows, width, 1 + more, windows=caches.has_windows, states=states)
            with torch.inference_mode():
                hidden_TH = runner._hidden(step)
                runner._hidden(step, Kept.last(step.cu_B1))
            assert compiled(launches) <= known, (rows, more, states, width)
        for rows in (2, 20, 40, 100, 300):
            launches.clear()
            with torch.inference_mode():
                logits_NV = model.logits(hidden_TH[:rows])  # pyrefly: ignore[unbound-name]
            assert compiled(launches) <= known, rows
        for (kind, sampling), rows in product(SAMPLINGS.items(), (1, 2, 3, 300)):
            launches.clear()
            states = [
                drawing_state(sampling if row % 2 else SAMPLINGS["greedy"]) for row in range(rows, 0, -1)
            ]
            wanted = [Wanted(n, n, state.position, state, ()) for n, state in enumerate(states)]
            with torch.inference_mode():
                runner._sampler.tokens(logits_NV[:1].expand(rows, -1), wanted)
            assert compiled(launches) <= known, (kind, rows)
    runner.close()


def compiled(launches: list[Launch]) -> set[tuple[str, str]]:
    return {(launch.kernel, launch.compiled) for launch in launches}


class MetaStream:
    """Launches the device's part of steps immediately."""

    device = META

    def launch(self, work: Callable[[], None]) -> StepEvent:
        work()
        return self

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a step")


SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.8),
    "filters": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01),
    "penalties": Sampling(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, logit_bias=((3, 1.0),),
        min_tokens=5,
    ),
}  # fmt: skip
DRAWS = {False: ["top_of_part", "weigh_part", "draw_token"]}
DRAWS[True] = [*DRAWS[False][:2], "copy_part", "draw_token"]
"""The kernels of draws without filters and with some."""
DECODE_LAUNCHES = 14
"""The same of a decode step, which is a graph with its head and its draws."""
OVERLAPPED_LAUNCHES = 15
"""The launches of a step beside its forward pass: copies, changes of page tables, tokens, draws."""


def drawing_state(sampling: Sampling, matcher: Matcher | None = None) -> SamplingState:
    asked = Request(request_id="", tokens=(0,), max_new_tokens=9, sampling=sampling, stop_token_ids=(1,))
    return SamplingState(asked, matcher)


def drawn_on_meta(states: list[SamplingState]) -> tuple[list[Launch], Counted]:
    """Draw for each state, twice. Return the launches and the copies of the second time."""
    sampler = Sampler(operators("triton", Path()), META)
    logits_NV = torch.empty(len(states), VOCABULARY, device=META)
    with pytest.MonkeyPatch.context() as patch, launching(patch) as launches:
        for _ in range(2):
            launches.clear()
            wanted = [Wanted(n, n, state.position, state, ()) for n, state in enumerate(states)]
            with Counted() as counted:
                tokens_N = sampler.tokens(logits_NV, wanted)
            for state in states:
                state.push(7)
        assert tokens_N.device == META
    return launches, counted


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_draws_of_any_number_of_rows_are_one_copy_and_few_launches(kind: str, rows: int) -> None:
    """Many programs share the scores of a row; the one that draws reads a part of them."""
    launches, counted = drawn_on_meta([drawing_state(SAMPLINGS[kind]) for _ in range(rows)])
    wanted = DRAWS[kind in {"filters", "penalties"}]
    adjusted = ["count_change", "adjust_part"] if kind == "penalties" else []
    assert [launch.kernel for launch in launches] == [*adjusted, *wanted]
    *parts, last = launches[-len(wanted) :]
    assert {launch.grid for launch in parts} == {(rows, -(-VOCABULARY // BLOCK))}
    assert last.grid == (rows,)
    assert (counted.to_device, counted.to_host) == (1, 0)
    assert counted.count == counted.to_device


def test_masks_of_grammars_travel_with_the_numbers_of_the_draws() -> None:
    grammars = Grammars(bundled()["keeper"], VOCABULARY, (2,))
    matchers = [grammars.matcher(Grammar(kind="regex", text="[a-z ]{9}")) for _ in range(16)]
    launches, counted = drawn_on_meta([drawing_state(SAMPLINGS["greedy"], matcher) for matcher in matchers])
    grammars.close()
    assert [launch.kernel for launch in launches] == ["adjust_part", *DRAWS[False]]
    assert (counted.to_device, counted.to_host, counted.count) == (1, 0, 1)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "filters"])
def test_overlapped_step_waits_for_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, graphs: bool
) -> None:
    """The second step of streams and a prompt: all its integers in one copy, the numbers of its draws in
    another, and its tokens back in a third. Padding it to a graph takes three copies on the device."""
    name, rows = "Qwen3-Next-80B-A3B", 32
    model, caches = released(name)
    tables = PageTables(rows + 1, TABLE_WIDTH, windows=caches.has_windows)
    runner = OverlappedRunner(model, caches, PAGE_TOKENS, 1, MetaStream(), None, tables)
    states = [drawing_state(SAMPLINGS[kind]) for _ in range(rows)]

    def step(start: int, token: int) -> Step:
        pages = tuple(map(PageId, range(1 + start // PAGE_TOKENS)))
        streams = [
            a_row(str(n), (token,), start, state)._replace(pages=pages) for n, state in enumerate(states)
        ]
        prompt = a_row("prompt", (5,) * 64, 64 * (start - 1))
        return (*streams, prompt._replace(pages=tuple(map(PageId, range(start)))))

    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # in it, modes see composed operators
    replays: list[GraphShape] = []
    if graphs:
        with launching(monkeypatch):
            runner._graphs = Graphs(
                lambda inputs: model.forward(inputs, caches),
                graph_shapes(rows + 1, 600, 0),
                TABLE_WIDTH,
                META,
                captured,
            )
        for shape, graph in runner._graphs._graphs.items():
            runner._graphs._graphs[shape] = replace(graph, replay=partial(replays.append, shape))
    with launching(monkeypatch) as launches, Counted() as counted:
        runner._launch_ahead(step(1, 5))
        launches.clear()
        counted.count = counted.to_device = counted.to_host = 0
        runner._launch_ahead(step(2, PENDING))
        overlapped = len(launches) + counted.count
        drawing = DRAWS[kind == "filters"]
        assert [launch.kernel for launch in launches][-len(drawing) :] == drawing
        assert (counted.to_device, counted.to_host) == (2, 1)
        launches.clear()
        counted.count = 0
        inputs = padding(rows + 1, TABLE_WIDTH, 64, windows=caches.has_windows)
        moved = there(inputs, META)
        counted.count = 0
        hidden_TH = model.forward(moved, caches, None if graphs else Kept.last(moved.cu_B1))
        if graphs:  # their launches are one
            launches.clear()
            counted.count = 0
        model.logits(hidden_TH[:rows])
    runner.close()
    assert overlapped <= len(launches) + counted.count + OVERLAPPED_LAUNCHES + 3 * graphs
    assert replays == [GraphShape(rows + 2, rows + 1 + 64, 65)] * 2 * graphs


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("kind", ["filters", "penalties"])
def test_decode_step_is_one_graph_with_its_head_and_its_draws(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, overlapped: bool
) -> None:
    """Draws that a graph cannot know are launched after it, from its logits."""
    name, rows = "Qwen3-30B-A3B", 5
    model, caches = released(name)
    tables = PageTables(8, TABLE_WIDTH, windows=caches.has_windows)
    runner: TorchRunner = TorchRunner(model, caches, PAGE_TOKENS, 1, META)
    if overlapped:
        runner = OverlappedRunner(model, caches, PAGE_TOKENS, 1, MetaStream(), None, tables)
    states = [drawing_state(SAMPLINGS[kind] if n == 3 else SAMPLINGS["greedy"]) for n in range(rows)]
    step = tuple(a_row(str(n), (5,), 1, state)._replace(pages=(PageId(n),)) for n, state in enumerate(states))
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # in it, modes see composed operators
    with launching(monkeypatch) as launches:
        runner._capture(graph_shapes(8, 600, 0), TABLE_WIDTH, captured)
        assert [launch.kernel for launch in launches][-4:] == DRAWS[True]
        assert isinstance(runner._graphs, Graphs)
        replays: list[GraphShape] = []
        for shape, graph in runner._graphs._graphs.items():
            runner._graphs._graphs[shape] = replace(graph, replay=partial(replays.append, shape))
        launches.clear()
        with torch.no_grad(), _Products() as products:
            if isinstance(runner, OverlappedRunner):
                with Counted() as counted:
                    runner._launch_ahead(step)
                assert counted.to_host == 1
                assert counted.count <= DECODE_LAUNCHES or kind == "penalties"
            else:
                outputs = runner._outputs(step, [5] * rows)
                assert outputs.logits_NV.shape == (rows, VOCABULARY)
                assert (outputs.tokens_N is None) == (kind == "penalties")
    runner.close()
    assert replays == [GraphShape(8, 8)]
    assert not products.dtypes, "no head outside the graph"
    after = ["adjust_part", *DRAWS[True]] if overlapped and kind == "penalties" else []
    assert [launch.kernel for launch in launches if launch.kernel != "count_change"] == after
