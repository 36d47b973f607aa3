"""A prediction head fills each slot with what belongs there, however a sequence is cut, and guesses from the
right place."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernels.launched import META, Counted
from tests.support.workers.released import there
from tidemill.kvstore.layout import PageId
from tidemill.workers.execution import mtp_drafter as drafter_module
from tidemill.workers.execution.cuda_graphs import Forward, GraphDraws, Replay, graph_shapes
from tidemill.workers.execution.mtp_drafter import DrawnEnd, MtpDrafter
from tidemill.workers.execution.step import Row
from tidemill.workers.models.inputs import Caches, Inputs
from tidemill.workers.parallel.frames import ELSEWHERE

VOCABULARY = 7
ZEROS = (0.0, 0.0)
NO_CACHES = Caches((), (), ())

Slot = tuple[tuple[float, ...], int]
"""The hidden state before a token, and the token."""


def hidden_of(tokens: list[int]) -> tuple[float, ...]:
    """Return the hidden state of the model after the last token: no two prefixes have the same."""
    number = 1
    for token in tokens:
        number = number * (VOCABULARY + 1) + token + 1
    return (float(number % 99991), float(len(tokens)))


@dataclass
class Recorder:
    """A head that writes down what it sees, and whose hidden states are (token, position)."""

    page_tokens: int
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)  # by page, and place in it
    steps: int = 0

    def forward(self, hidden_TH: torch.Tensor, inputs: Inputs, caches: Caches) -> torch.Tensor:
        assert caches is NO_CACHES
        assert inputs.windows_BN.shape[1] == 0
        self.steps += 1
        cu = inputs.cu_B1.tolist()
        for index, (start, end) in enumerate(pairwise(cu)):
            pages = inputs.pages_BN[index].tolist()
            assert int(inputs.lens_B[index]) == int(inputs.positions_T[end - 1]) + 1
            for place in range(start, end):
                page, offset = divmod(int(inputs.positions_T[place]), self.page_tokens)
                assert pages[page], "a slot without a page"
                self.slots[pages[page], offset] = (
                    tuple(hidden_TH[place].tolist()),
                    int(inputs.tokens_T[place]),
                )
        return torch.stack([inputs.tokens_T, inputs.positions_T], dim=1).float()


def guess_of(token: int, position: int) -> int:
    return (3 * token + position + 1) % VOCABULARY


def choose(logits_NV: torch.Tensor) -> torch.Tensor:
    """`logits` are the hidden states themselves here: the last token of each row, and its position."""
    return torch.tensor([guess_of(int(token), int(position)) for token, position in logits_NV.tolist()])


@dataclass
class Fed:
    """One sequence on its way: `known` of its `tokens` are known, `computed` are computed."""

    name: str
    tokens: list[int]
    known: int
    pages: tuple[PageId, ...]
    computed: int = 0
    guesses: tuple[int, ...] = ()

    def row(self, num_tokens: int, pages: int, page_tokens: int) -> tuple[Row, DrawnEnd]:
        """Return the next row, of `num_tokens` known tokens if they end on a page boundary or are all, with
        the last guesses if it is one token; and what it draws."""
        end = min(self.computed + num_tokens, self.known)
        if end < self.known:
            end = max(end // page_tokens * page_tokens, min(self.known, self.computed + page_tokens))
            end = end if end == self.known else end // page_tokens * page_tokens
        sampling_state = end == self.known
        drafts = self.guesses if sampling_state and end - self.computed == 1 else ()
        drafts = drafts[: len(self.tokens) - 1 - end]
        reached = -(-(end + len(drafts)) // page_tokens)
        row = Row(
            self.name,
            (*self.tokens[self.computed : end], *drafts),
            self.computed,
            self.pages[: max(reached, pages)],
            None,
            (),
            drafts=len(drafts),
            sampling_state=ELSEWHERE if sampling_state else None,
        )
        drawn = 0
        if sampling_state:
            drawn = 1
            while drawn <= len(drafts) and drafts[drawn - 1] == self.tokens[end + drawn - 1]:
                drawn += 1
        return row, DrawnEnd(drawn, self.tokens[end + drawn - 1]) if drawn else DrawnEnd()

    def land(self, row: Row, end: DrawnEnd, guesses: tuple[int, ...]) -> None:
        self.computed = row.end
        self.guesses = guesses
        if end.num_drawn:
            self.computed = row.end - row.drafts + end.num_drawn - 1
            self.known = self.computed + 1


@st.composite
def sequences(draw: st.DrawFn, page_tokens: int, name: int) -> Fed:
    """Tokens that the head guesses right about half of the time."""
    tokens = [draw(st.integers(0, VOCABULARY - 1))]
    for right in draw(st.lists(st.booleans(), min_size=4, max_size=30)):
        guessed = guess_of(tokens[-1], len(tokens) - 1)
        tokens.append(guessed if right else draw(st.integers(0, VOCABULARY - 1)))
    count = -(-len(tokens) // page_tokens)
    pages = tuple(PageId(100 * name + page) for page in draw(st.permutations(range(1, count + 1))))
    return Fed(str(name), tokens, draw(st.integers(1, len(tokens) - 1)), pages)


def check_slots(head: Recorder, fed: Fed) -> None:
    """All slots of tokens that are computed, and that of the last one drawn unless a page begins there."""
    size = head.page_tokens
    last = fed.computed if fed.known > fed.computed and fed.computed % size else fed.computed - 1
    for at in range(last + 1):
        before = hidden_of(fed.tokens[:at]) if at % size else ZEROS
        assert head.slots[fed.pages[at // size], at % size] == (before, fed.tokens[at]), at


@given(data=st.data(), page_tokens=st.sampled_from([1, 3, 4]), most=st.integers(1, 4))
def test_every_slot_depends_on_its_own_tokens(data: st.DataObject, page_tokens: int, most: int) -> None:
    live = [data.draw(sequences(page_tokens, name)) for name in range(1, 4)]
    head = Recorder(page_tokens)
    guesser = MtpDrafter(head, lambda hidden_NH: hidden_NH, NO_CACHES, page_tokens, most)
    while live := [fed for fed in live if fed.known < len(fed.tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique_by=id))
        rows = [
            fed.row(data.draw(st.integers(1, 9)), data.draw(st.integers(0, len(fed.pages))), page_tokens)
            for fed in chosen
        ]
        step = tuple(row for row, _ in rows)
        tokens = [token for row in step for token in row.tokens]
        hidden_TH = torch.tensor(
            [
                hidden_of([*fed.tokens[: row.start], *row.tokens[: count + 1]])
                for fed, row in zip(chosen, step, strict=True)
                for count in range(len(row.tokens))
            ]
        )
        guesses = guesser.run(step, tokens, hidden_TH, [end for _, end in rows], choose)
        for fed, (row, end), some in zip(chosen, rows, guesses, strict=True):
            fed.land(row, end, some)
            check_guesses(fed, row, some, most, page_tokens)
            check_slots(head, fed)


def check_guesses(fed: Fed, row: Row, guesses: tuple[int, ...], most: int, page_tokens: int) -> None:
    """Check the guesses: as many as the pages of the row allow, each from the one before."""
    if row.sampling_state is None:
        assert guesses == ()
        return
    at, token = fed.computed, fed.tokens[fed.computed]
    assert len(guesses) == min(most, max(0, len(row.pages) * page_tokens - at))
    for guess in guesses:
        assert guess == guess_of(token, at)
        token, at = guess, at + 1


def test_without_a_slot_the_head_rests() -> None:
    """The last token of a page has its slot already, and the token behind it has no page yet."""
    head = Recorder(4)
    guesser = MtpDrafter(head, lambda hidden_NH: hidden_NH, NO_CACHES, 4, 2)
    row = Row("", (5,), 3, (PageId(1),), None, (), sampling_state=ELSEWHERE)
    assert guesser.run((row,), (5,), torch.zeros(1, 2), [DrawnEnd(1, 6)], choose) == [()]
    assert head.steps == 0


class There:
    """A head on a device."""

    def forward(self, hidden_TH: torch.Tensor, inputs: Inputs, caches: Caches) -> torch.Tensor:
        assert caches is NO_CACHES
        assert inputs.tokens_T.device == META
        return hidden_TH.new_empty(len(inputs.tokens_T), 2)


@pytest.mark.parametrize("graphs", [False, True])
def test_host_waits_for_all_guesses_together(monkeypatch: pytest.MonkeyPatch, *, graphs: bool) -> None:
    replays: list[int] = []

    def captured(run: Forward) -> tuple[Replay, torch.Tensor]:
        hidden_TH = run()
        return lambda: replays.append(len(hidden_TH)), hidden_TH

    read: list[int] = []

    def ids(ids_N: torch.Tensor) -> list[int]:
        read.append(len(ids_N))
        return [3] * len(ids_N)

    monkeypatch.setattr(drafter_module, "token_ids", ids)
    monkeypatch.setattr(drafter_module, "on_device", there)
    products: list[int] = []

    def logits(hidden_NH: torch.Tensor) -> torch.Tensor:
        products.append(len(hidden_NH))
        return hidden_NH

    def most_likely(logits_NV: torch.Tensor, *_: object) -> torch.Tensor:
        return logits_NV.argmax(dim=-1)

    guesser = MtpDrafter(There(), logits, NO_CACHES, 4, 3)
    if graphs:
        draws = GraphDraws(logits, most_likely, 4, META, keeps_logits=False)
        guesser.use_graphs(graph_shapes(4, 20, 3), 9, captured, torch.empty(20, 2, device=META), draws)
        assert products == [4, 4, 2, 1], "of the graphs whose tokens all draw"
        products.clear()
    rows = [Row("", (5,), 3, (PageId(1),) * pages, None, (), sampling_state=ELSEWHERE) for pages in (1, 2, 3)]
    with Counted() as counted:
        guesses = guesser.run(
            tuple(rows),
            (5,) * 3,
            torch.empty(3, 2, device=META),
            [DrawnEnd(1, 6)] * 3,
            most_likely,
        )
    assert guesses == [(), (3, 3, 3), (3, 3, 3)]
    assert read == [6]
    assert replays == [2] * 3 * graphs
    assert products == [] if graphs else [2] * 3, "the head is a part of the graph"
    assert counted.to_host == 0
