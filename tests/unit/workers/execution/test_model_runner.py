"""Steps become tensors and logits become tokens: each row its own, whatever lies beside it."""

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waits import eventually
from tests.support.workers.drawing import draw
from tidemill.kernels.dispatch import REFERENCE
from tidemill.kvstore.layout import PageId, StateId, WindowId
from tidemill.kvstore.memory.lease import StateWrite
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import PENDING, Drawn, PagesLost, Row, Scores, Step
from tidemill.workers.execution.step_tensors import inputs_of, kept_of
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.inputs import Caches, Inputs, Kept

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
VOCABULARY = 50
NO_CACHES = Caches((), (), ())

state_ids = st.none() | st.integers(0, 9).map(StateId)


@st.composite
def rows(draw_from: st.DrawFn, page_tokens: int) -> Row:
    start = draw_from(st.integers(0, 20))
    tokens = draw_from(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
    needed = -(-(start + len(tokens)) // page_tokens)
    reserved = draw_from(st.integers(0, 2))
    drafts = draw_from(st.integers(0, len(tokens) - 1))
    depths = draw_from(st.just(set[int]()) | st.sets(st.integers(1, len(tokens)), min_size=1, max_size=5))
    pages = draw_from(st.lists(st.integers(1, 99), min_size=needed + reserved, max_size=needed + reserved))
    windows = draw_from(st.just([]) | st.lists(st.integers(0, 99), min_size=needed, max_size=needed))
    sampling = draw_from(
        st.none() | st.builds(Sampling, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 5))
    )
    known = start + len(tokens) - drafts
    return Row(
        sequence_id="",
        tokens=tuple(tokens),
        start=start,
        pages=tuple(map(PageId, pages)),
        read=draw_from(state_ids) if start else None,
        writes=tuple(
            StateWrite(start + depth, StateId(state))
            for depth, state in zip(sorted(depths), draw_from(st.permutations(range(10))), strict=False)
        ),
        drafts=drafts,
        sampling_state=None if sampling is None else draws_at(known, sampling),
        windows=tuple(map(WindowId, windows)),
    )


def draws_at(position: int, sampling: Sampling) -> SamplingState:
    return SamplingState(Request(request_id="", tokens=(0,) * position, max_new_tokens=9, sampling=sampling))


@st.composite
def steps(draw_from: st.DrawFn) -> tuple[Step, int]:
    page_tokens = draw_from(st.sampled_from([1, 4, 16]))
    return tuple(draw_from(st.lists(rows(page_tokens), min_size=1, max_size=5))), page_tokens


class Echo:
    """A model whose hidden states are (token, position), and whose logits are noise seeded by both."""

    ops = REFERENCE

    def __init__(self) -> None:
        self.seen: list[Inputs] = []
        self.broken = False

    def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:
        assert caches == NO_CACHES
        assert torch.is_inference_mode_enabled()
        if self.broken:
            raise ZeroDivisionError
        self.seen.append(inputs)
        hidden_TH = torch.stack([inputs.tokens_T, inputs.positions_T], dim=1)
        return hidden_TH if kept is None else hidden_TH[kept.tokens_K]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return torch.stack([noise(int(token), int(position)) for token, position in hidden_NH])


def noise(token: int, position: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1000 * position + token))


@PROPERTY
@given(steps())
def test_integers_of_a_step(drawn: tuple[Step, int]) -> None:
    step, page_tokens = drawn
    inputs = inputs_of(step, [token for row in step for token in row.tokens], page_tokens)
    assert inputs.tokens_T.dtype == inputs.positions_T.dtype == torch.int64
    for tensor in (
        inputs.cu_B1,
        inputs.pages_BN,
        inputs.windows_BN,
        inputs.lens_B,
        inputs.read_B,
        inputs.writes_BK,
    ):
        assert tensor.dtype == torch.int32
    cu = inputs.cu_B1.tolist()
    assert (len(cu), cu[0], cu[-1]) == (len(step) + 1, 0, len(inputs.tokens_T))
    width = inputs.writes_BK.shape[1]
    assert width == max([1, *(row.end - depth + 1 for row in step for depth, _ in row.writes)])
    for index, row in enumerate(step):
        first, last = cu[index], cu[index + 1]
        assert row.end == row.start + len(row.tokens)
        assert inputs.tokens_T[first:last].tolist() == list(row.tokens)
        assert inputs.positions_T[first:last].tolist() == list(range(row.start, row.end))
        assert int(inputs.lens_B[index]) == row.end
        reached = -(-row.end // page_tokens)
        table = inputs.pages_BN[index].tolist()
        assert table[:reached] == list(row.pages[:reached])
        assert not any(table[reached:])
        views = inputs.windows_BN[index].tolist()
        assert views[: len(row.windows[:reached])] == list(row.windows[:reached])
        assert not any(views[reached:])
        assert int(inputs.read_B[index]) == (-1 if row.read is None else row.read)
        slots = dict(row.writes)
        depths = range(row.end - width + 1, row.end + 1)
        assert inputs.writes_BK[index].tolist() == [slots.get(depth, -1) for depth in depths]
    assert inputs.pages_BN.shape[1] == max(-(-int(end) // page_tokens) for end in inputs.lens_B)


def fresh(step: Step) -> Step:
    """The same, of which nothing was drawn yet."""
    return tuple(
        row
        if row.sampling_state is None
        else row._replace(sampling_state=draws_at(row.end - row.drafts, row.sampling_state.sampling))
        for row in step
    )


@PROPERTY
@given(steps())
def test_each_row_draws_behind_its_last_token_and_its_guesses(drawn: tuple[Step, int]) -> None:
    step, page_tokens = drawn
    found = TorchRunner(Echo(), NO_CACHES, page_tokens, threads=1).run_now(fresh(step))
    for row, row_drawn in zip(fresh(step), found, strict=True):
        if row.sampling_state is None:
            assert row_drawn == Drawn()
        else:
            first = len(row.tokens) - row.drafts - 1
            places = range(row.start + first, row.end)
            logits_NV = torch.stack([noise(row.tokens[at - row.start], at) for at in places])
            assert [row_drawn] == draw(logits_NV, [row])
            assert 1 <= len(row_drawn.tokens) <= 1 + row.drafts


def a_row(name: str, tokens: tuple[int, ...], start: int, sampling_state: SamplingState | None = None) -> Row:
    return Row(
        sequence_id=name,
        tokens=tokens,
        start=start,
        pages=(PageId(1),) * 5,
        read=None,
        writes=(),
        sampling_state=sampling_state,
    )


@PROPERTY
@given(steps(), st.integers(0, 4))
def test_tokens_that_draw_or_have_scores_are_kept_and_one_of_each_row(
    drawn: tuple[Step, int], scored: int
) -> None:
    step, _ = drawn
    step = tuple(
        row._replace(scores=Scores(0, row.tokens[:1], 0)) if index == scored else row
        for index, row in enumerate(step)
    )
    wanted: list[int] = []
    starts = [0]
    end = 0
    for row in step:
        draws = 1 if row.sampling_state is None else 1 + row.drafts
        every = range(end, end + len(row.tokens))
        wanted += every if row.scores else every[len(every) - draws :]
        end += len(row.tokens)
        starts.append(len(wanted))
    kept = kept_of(step)
    if kept is None:
        assert wanted == list(range(end))
    else:
        assert (kept.tokens_K.tolist(), kept.cu_B1.tolist()) == (wanted, starts)


@pytest.mark.parametrize("computes", [True, False])
async def test_cpu_time_of_a_step_is_seen_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, *, computes: bool
) -> None:
    ends = threading.Event()

    def forward(_inputs: Inputs, _caches: Caches, _kept: None) -> torch.Tensor:
        while not ends.wait(0 if computes else None):
            pass
        return torch.zeros(1, VOCABULARY)

    model = Echo()
    monkeypatch.setattr(model, "forward", forward)
    runner = TorchRunner(model, NO_CACHES, page_tokens=4, threads=1)
    step = asyncio.ensure_future(runner.run((a_row("a", (3,), 0),)))
    await asyncio.sleep(0.2)
    before_s = runner.cpu_s()
    if computes:  # a busy machine grants time late
        while True:
            await asyncio.sleep(0.01)
            if runner.cpu_s() - before_s > 0.1:
                break
    else:
        await asyncio.sleep(0.2)
        assert runner.cpu_s() - before_s < 0.1
    ends.set()
    await step
    runner.close()
    assert runner.cpu_s() == 0.0


def test_with_guesses_it_is_the_last_one_of_those_drawn() -> None:
    greedy = Sampling(temperature=0.0)
    truth = [int(noise(4, 1).argmax())]
    truth.append(int(noise(truth[0], 2).argmax()))
    truth.append(int(noise(truth[1], 3).argmax()))
    model = Echo()
    runner = TorchRunner(model, NO_CACHES, page_tokens=4, threads=1)
    guessed = a_row("a", (4, *truth[:2]), 1, draws_at(2, greedy))._replace(drafts=2)
    assert runner.run_now((guessed,)) == [Drawn(tuple(truth))]
    runner.run_now((a_row("a", (PENDING,), 4, draws_at(5, greedy)),))
    assert model.seen[1].tokens_T.tolist() == truth[2:]
    runner.close()


class Layered(Echo):
    """Records when the host launches layers, and reads the pages of each."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def forward(self, inputs: Inputs, caches: Caches, kept: Kept | None = None) -> torch.Tensor:
        for number, _ in enumerate(caches.paged()):
            self._events.append(f"layer {number}")
        return super().forward(inputs, NO_CACHES, kept)


class RecordedStream:
    """A stream of a device that records when the host waits for it."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def record_event(self) -> None:
        self._events.append("event")

    def synchronize(self) -> None:
        self._events.append("wait")


@pytest.mark.parametrize("error", [None, PagesLost("lost")])
def test_layer_is_launched_when_its_slice_is_here_and_no_stream_is_waited_for(
    error: PagesLost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the store between layers, while the device runs those before."""
    events: list[str] = []
    page = torch.zeros(1)
    caches = Caches((page, page, page, page), (), (), slices=(0, 0, 1, 2))
    runner = TorchRunner(Layered(events), caches, 4, threads=1)
    monkeypatch.setattr(runner, "_stream", RecordedStream(events))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    arrivals = tuple(Future[None]() for _ in range(3))
    arrivals[0].set_result(None)
    row = a_row("a", (1, 2), 4, draws_at(6, Sampling(temperature=0)))._replace(arrivals=arrivals)
    running = runner._thread.submit(runner.run_now, (row,))
    try:
        for launched, arrival in ((2, arrivals[1]), (3, arrivals[2])):
            eventually(lambda launched=launched: len(events) >= launched)
            time.sleep(0.02)
            assert events == [f"layer {number}" for number in range(launched)]
            if error is not None and launched == 3:
                arrival.set_exception(error)
            else:
                arrival.set_result(None)
    finally:
        for arrival in arrivals:
            arrival.cancel()  # if it is still to come, so that the thread can end
    if error is None:
        assert len(running.result()[0].tokens) == 1
    else:
        with pytest.raises(PagesLost):
            running.result()
    assert events == [*(f"layer {number}" for number in range(3 + (error is None))), "event", "wait"]
    runner.close()
