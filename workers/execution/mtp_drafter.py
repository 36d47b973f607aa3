"""Guesses of the model's own prediction head (MTP), made in the step that draws the token before them.

The head has keys and values of its own, as one more attention layer in every page. Slot p holds the result of
the hidden state after token p - 1 together with token p; at the beginning of a page, of token p alone. So a
page depends on its tokens only, and a request that resumes at its end needs no more than the pages.

    a row runs [s, t), and e is the last token that it draws
    slots it writes    s ... e, but s only where a page begins: else the row that drew token s has written it
    guesses                      e+1, e+2 ...

After slot e the head continues with its own guesses, in memory that the row has anyway. Later rows overwrite
what it writes there, and at e where a page begins.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from tidemill.workers.execution.cuda_graphs import Capture, GraphDraws, Graphs, GraphShape
from tidemill.workers.execution.sampler import moved, token_ids
from tidemill.workers.execution.step import PENDING, Drawn, Row, Step
from tidemill.workers.execution.step_tensors import inputs_of
from tidemill.workers.models.architectures.registry import DraftHead
from tidemill.workers.models.inputs import Caches, Inputs, on_device

Choose: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Returns a guess for each row, int64 `[N]`, from logits `[N, vocabulary]` after its last token."""


class DrawnEnd(NamedTuple):
    """The number of tokens that a row drew, and the last of them."""

    num_drawn: int = 0
    token: int = -1


def ends_of(drawn: Sequence[Drawn]) -> list[DrawnEnd]:
    return [DrawnEnd(len(row.tokens), row.tokens[-1]) if row.tokens else DrawnEnd() for row in drawn]


class DraftRow(NamedTuple):
    """The work of the head for row `number` of a step: a row of its own and, for each token of it, the index
    of the hidden state before it (NONE: zeros). `guesses`: its last token is the last one drawn."""

    number: int
    row: Row
    sources: list[int]
    guesses: bool


NONE = -1


def slots_of(step: Step, tokens: Sequence[int], ends: Sequence[DrawnEnd], page_tokens: int) -> list[DraftRow]:
    """Return the rows of the head. `tokens` are those of all rows."""
    found: list[DraftRow] = []
    offset = 0
    for number, (row, end) in enumerate(zip(step, ends, strict=True)):
        first, last = row.start + (row.start % page_tokens != 0), row.end - 1
        drawn_at = NONE
        if end.num_drawn:
            drawn_at = row.end - row.drafts + end.num_drawn - 1
            last = min(drawn_at, len(row.pages) * page_tokens - 1)
        else:
            assert row.end % page_tokens == 0, "no row would write the slot where the next row begins"
        positions = range(first, last + 1)
        if positions:
            own = tuple(end.token if at == drawn_at else tokens[offset + at - row.start] for at in positions)
            sources = [
                offset + at - 1 - row.start if at % page_tokens or at == drawn_at else NONE
                for at in positions
            ]
            slots = row._replace(tokens=own, start=first, read=None, writes=(), drafts=0, windows=())
            found.append(DraftRow(number, slots, sources, last == drawn_at))
        offset += len(row.tokens)
    return found


class MtpDrafter:
    """Runs the head after the forward pass of a step. In a group each rank has one, and their `choose`
    returns the same on all ranks."""

    def __init__(
        self,
        head: DraftHead,
        logits: Callable[[torch.Tensor], torch.Tensor],
        caches: Caches,
        page_tokens: int,
        guesses_max: int,
    ) -> None:
        """Create a drafter. `logits` computes those of the model."""
        self._head = head
        self._logits = logits
        self._caches = caches
        self._page_tokens = page_tokens
        self._guesses_max = guesses_max
        self._graphs: Graphs | None = None
        self._before_TH = torch.empty(0)  # what the graphs read beside their inputs

    def use_graphs(
        self,
        shapes: Iterable[GraphShape],
        table_width: int,
        capture: Capture,
        like_TH: torch.Tensor,
        guesses: GraphDraws,
    ) -> None:
        """Capture graphs of the head. `like_TH` are hidden states of as many tokens as the largest has.
        `guesses` are greedy."""
        self._before_TH = before_TH = torch.zeros_like(like_TH)

        def forward(inputs: Inputs) -> torch.Tensor:
            return self._head.forward(before_TH[: len(inputs.tokens_T)], inputs, self._caches)

        self._graphs = Graphs(forward, shapes, table_width, like_TH.device, capture, draws=guesses)

    def warm_up(self, hidden_TH: torch.Tensor, inputs: Inputs) -> None:
        """Run the head over a step of padding."""
        self._head.forward(hidden_TH.clone(), on_device(inputs, hidden_TH.device), self._caches)

    def run(
        self,
        step: Step,
        tokens: Sequence[int],
        hidden_TH: torch.Tensor,
        ends: Sequence[DrawnEnd],
        choose: Choose,
    ) -> list[tuple[int, ...]]:
        """Write the slots of the step. Return the guesses of each row: none where nothing was drawn or the
        last token has no memory yet. `hidden_TH` are the model's, after all `tokens` of the step."""
        found = slots_of(step, tokens, ends, self._page_tokens)
        if not found:
            return [()] * len(step)
        device = hidden_TH.device
        sources = [source for slots in found for source in slots.sources]
        sources_T = moved(np.array(sources), device)
        before_TH = hidden_TH[sources_T.clamp(min=0)].masked_fill((sources_T == NONE)[:, None], 0.0)
        after = self._forward(before_TH, tuple(slots.row for slots in found))
        ends_N = accumulate(len(slots.sources) for slots in found)
        last = [end - 1 for end, slots in zip(ends_N, found, strict=True) if slots.guesses]
        rows = {slots.number: slots.row for slots in found if slots.guesses}
        guesses = self._guess(rows, after.of(moved(np.array(last), device)), choose) if rows else {}
        return [tuple(guesses.get(index, ())) for index in range(len(step))]

    def _guess(self, rows: dict[int, Row], after: "After", choose: Choose) -> dict[int, list[int]]:
        """Return the guesses by the index of each row, from what is after its last token. Guesses stay on the
        device, and the host waits for all of them together."""
        rounds: list[tuple[list[int], torch.Tensor]] = []
        while True:
            hidden_NH, chosen_N = after
            if chosen_N is None:
                chosen_N = choose(self._logits(hidden_NH))
            rounds.append((list(rows), chosen_N))
            going = [
                len(rounds) < self._guesses_max and row.end < len(row.pages) * self._page_tokens
                for row in rows.values()
            ]
            if not any(going):
                break
            rows = {
                index: row._replace(tokens=(PENDING,), start=row.end)
                for (index, row), goes in zip(rows.items(), going, strict=True)
                if goes
            }
            going_N = moved(np.flatnonzero(going), hidden_NH.device)
            after = self._forward(hidden_NH[going_N], tuple(rows.values()), chosen_N[going_N])
        tokens = iter(token_ids(torch.cat([chosen_N for _, chosen_N in rounds])))
        guesses: dict[int, list[int]] = {}
        for indices, _ in rounds:
            for index in indices:
                guesses.setdefault(index, []).append(next(tokens))
        return guesses

    def _forward(self, before_TH: torch.Tensor, rows: Step, tokens_T: torch.Tensor | None = None) -> "After":
        """Run the head. `tokens_T` are those of the rows where only the device knows them."""
        tokens = [token for row in rows for token in row.tokens]
        step = inputs_of(rows, tokens, self._page_tokens)
        if self._graphs is not None and (graph := self._graphs.graph_of(step, step.pages_BN.shape[1])):
            self._before_TH[: len(tokens)] = before_TH
            hidden_TH = graph.run(step, tokens_T)
            return After(
                hidden_TH, None if graph.draws is None else graph.draws.tokens_T[: len(tokens)].clone()
            )
        inputs = on_device(step, before_TH.device)
        if tokens_T is not None:
            inputs = replace(inputs, tokens_T=tokens_T)
        return After(self._head.forward(before_TH, inputs, self._caches), None)


class After(NamedTuple):
    """The results of the head behind each token: hidden states, and guesses (int64) where its graph makes
    them."""

    hidden_TH: torch.Tensor
    guesses_T: torch.Tensor | None

    def of(self, tokens_N: torch.Tensor) -> "After":
        return After(self.hidden_TH[tokens_N], None if self.guesses_T is None else self.guesses_T[tokens_N])
