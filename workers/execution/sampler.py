"""Draw the tokens of a step. Each is a function of its logits, the tokens before it, its seed and its
position, and of nothing else.

The uniform number of a draw is a hash of (seed, position). So a stream that moves to another worker continues
with the same draws, and a guess is compared with the token that would be drawn anyway.

    start    one copy of all numbers to the device; count, adjust, draw; one copy of the tokens back
    result   waits for the tokens; rows with a grammar go on from guess to guess

Only `result` waits for the device. A graph draws the tokens of a step itself if all are drawn from the logits
as they are (`plain_draws`).
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from tidemill.kernels.dispatch import Operators
from tidemill.kernels.draw.tables import (
    NO_ROOM,
    AdjustmentField,
    ChangeField,
    DrawField,
    ItemField,
    least_of,
    scale_of,
)
from tidemill.workers.device import HOST
from tidemill.workers.execution.count_table import CountTable
from tidemill.workers.execution.grammar import Mask, mask_of
from tidemill.workers.execution.logprobs import Logprobs, start_logprobs
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Drawn, Row, Step
from tidemill.workers.execution.step_tensors import Ints
from tidemill.workers.messages import RequestError, Sampling, TokenLogprob

MASKS_S_MAX = 0.02
"""The time that a step waits for the masks of its rows, all together."""


class Wanted(NamedTuple):
    """One draw: of row `row` of the step, from row `source` of the logits, after the drafts `before`."""

    row: int
    source: int
    position: int
    state: SamplingState
    before: tuple[int, ...]


class LaunchedDraws(NamedTuple):
    """Draws that were launched. `host_N` has the tokens when `copied` has happened."""

    wanted: list[Wanted]
    host_N: torch.Tensor
    copied: torch.cuda.Event | None
    logprobs: list[tuple[list[int], Logprobs]]

    def read(self) -> tuple[list[int], dict[int, TokenLogprob]]:
        """Return the tokens, and the logprobs of those draws that report them."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, found = token_ids(self.host_N), dict[int, TokenLogprob]()
        for draws, logprobs in self.logprobs:
            found.update(zip(draws, logprobs.read(), strict=True))
        return tokens, found


class Sampler:
    """Draws on the device of the logits, with the counts of the answers that have penalties."""

    def __init__(self, ops: Operators, device: torch.device = HOST) -> None:
        self._ops = ops
        self._device = device
        self._counts = CountTable(device)

    def draw(
        self, logits_NV: torch.Tensor, rows: Sequence[Row], tokens_N: torch.Tensor | None = None
    ) -> list[Drawn]:
        return self.start(logits_NV, rows, tokens_N).result()

    def start(
        self, logits_NV: torch.Tensor, rows: Sequence[Row], tokens_N: torch.Tensor | None = None
    ) -> "Drawing":
        """Launch what each row draws. `logits_NV` (float32) holds, row after row, those after each of the
        row's last `drafts + 1` tokens. `tokens_N` (int64) were drawn from them, if a graph did."""
        return Drawing(self, logits_NV, rows, tokens_N)

    def tokens(self, logits_NV: torch.Tensor, wanted: list[Wanted]) -> torch.Tensor:
        """Launch the draws. Return the tokens `[N]` (int64) where the logits are."""
        tables = Tables(logits_NV.shape[1], self._counts)
        for draw in wanted:
            tables.add(draw)
        draws_NF, rows_MF, items_IF, changes_CF, masks_GW = tables.on(self._device)
        counts_SV, scores_MV = self._counts.counts_SV, logits_NV[:0]
        if len(changes_CF):
            self._ops.count(counts_SV, changes_CF)
        tables.counted()
        if len(rows_MF):
            scores_MV = self._ops.adjust(logits_NV, counts_SV, masks_GW, rows_MF, items_IF)
        return self._ops.draw(logits_NV, scores_MV, draws_NF, tables.filtered)

    def launch(
        self, logits_NV: torch.Tensor, wanted: list[Wanted], tokens_N: torch.Tensor | None = None
    ) -> LaunchedDraws:
        """Launch the draws unless a graph did, their logprobs and the copy to the host."""
        if not wanted:  # all rows are late
            return LaunchedDraws([], torch.zeros(0, dtype=torch.int64), None, [])
        tokens_N = self.tokens(logits_NV, wanted) if tokens_N is None else tokens_N
        host_N, copied = tokens_N, None
        if tokens_N.is_cuda:
            host_N = torch.empty(len(wanted), dtype=torch.int64, pin_memory=True)
            host_N.copy_(tokens_N, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return LaunchedDraws(wanted, host_N, copied, self._logprobs(logits_NV, wanted, tokens_N))

    def _logprobs(
        self, logits_NV: torch.Tensor, wanted: list[Wanted], tokens_N: torch.Tensor
    ) -> list[tuple[list[int], Logprobs]]:
        asking: dict[int, list[int]] = {}
        for index, draw in enumerate(wanted):
            if draw.state.sampling.logprobs is not None:
                asking.setdefault(draw.state.sampling.logprobs, []).append(index)
        found: list[tuple[list[int], Logprobs]] = []
        for alternatives, draws in asking.items():
            places_2N = moved(np.array([[wanted[draw].source for draw in draws], draws]), self._device)
            logprobs_NV = logits_NV[places_2N[0]].double().log_softmax(dim=-1)
            found.append((draws, start_logprobs(logprobs_NV, tokens_N[places_2N[1]], alternatives)))
        return found


class Drawing:
    """The draws of a step after their launch."""

    def __init__(
        self,
        sampler: Sampler,
        logits_NV: torch.Tensor,
        rows: Sequence[Row],
        tokens_N: torch.Tensor | None,
    ) -> None:
        """Launch. All positions of a row are drawn as if its guesses were right, except with a grammar."""
        *self._starts, count = accumulate((row.drafts + 1 for row in rows), initial=0)
        assert len(logits_NV) == count
        self._sampler, self._logits_NV, self._rows = sampler, logits_NV, rows
        for row in rows:
            _sampling_state(row).rewind(row.end - row.drafts)
        self._failed: dict[int, Drawn] = {}
        self._deadline_s = monotonic() + MASKS_S_MAX
        _start_masks(rows)
        ready = _with_masks(rows, range(len(rows)), self._deadline_s, self._failed)
        wanted = [
            self._wanted(index, ahead)
            for index in ready
            for ahead in range(1 if _sampling_state(rows[index]).matcher else rows[index].drafts + 1)
        ]
        self._batch = sampler.launch(logits_NV, wanted, tokens_N)

    def result(self) -> list[Drawn]:
        """Return what each row draws, and advance the rows' sampling states.

        The first token is drawn as if there were no draft. While a token equals the draft in its position,
        the next one is drawn after it, so the tokens are those of a step without drafts
        (decision 12). A row whose mask is not ready in time is late and draws nothing.
        """
        rows, batch = self._rows, self._batch
        drawn = [Drawn()] * len(rows)
        while True:
            going = self._take(batch, drawn)
            # A draft without a mask stays unconfirmed: what is drawn so far counts.
            going = _with_masks(rows, going, self._deadline_s, {})
            if not going:
                break
            wanted = [self._wanted(index, len(drawn[index].tokens)) for index in going]
            batch = self._sampler.launch(self._logits_NV, wanted)
        _start_masks(rows)
        return [self._failed.get(index, row_drawn) for index, row_drawn in enumerate(drawn)]

    def _take(self, batch: LaunchedDraws, drawn: list[Drawn]) -> list[int]:
        """Add the draws that follow right guesses. Return the rows that have another guess to try."""
        tokens, logprobs = batch.read()
        for at, (draw, token) in enumerate(zip(batch.wanted, tokens, strict=True)):
            have = drawn[draw.row]
            if have.tokens != draw.before:  # a guess before it was wrong
                continue
            draw.state.push(token)
            reported = (logprobs[at],) if at in logprobs else ()
            drawn[draw.row] = have._replace(
                tokens=(*have.tokens, token), logprobs=(*have.logprobs, *reported)
            )
        asked = dict.fromkeys(draw.row for draw in batch.wanted if self._rows[draw.row].drafts)
        return [index for index in asked if self._goes_on(index, drawn[index].tokens)]

    def _goes_on(self, index: int, tokens: tuple[int, ...]) -> bool:
        drafts = _drafts(self._rows[index])
        return len(tokens) <= len(drafts) and tokens == drafts[: len(tokens)]

    def _wanted(self, index: int, ahead: int) -> Wanted:
        row = self._rows[index]
        drafts = _drafts(row)
        position = row.end - len(drafts) + ahead
        return Wanted(index, self._starts[index] + ahead, position, _sampling_state(row), drafts[:ahead])


class Tables:
    """The numbers of a step's draws, which travel to the device as one."""

    def __init__(self, vocabulary: int, counts: CountTable) -> None:
        self.filtered = 0
        self._vocabulary = vocabulary
        self._counts = counts
        self._draws: list[tuple[float, ...]] = []
        self._rows: list[tuple[float, ...]] = []
        self._items: list[tuple[float, ...]] = []
        self._changes: list[tuple[float, ...]] = []
        self._masks: list[Mask] = []
        self._penalised: dict[SamplingState, int] = {}

    def add(self, draw: Wanted) -> None:
        state, source = draw.state, draw.source
        barred = state.barred_at(draw.position, draw.before)
        if not state.plain or barred:
            source = -1 - len(self._rows)
            self._adjust(draw, barred)
        self._draws.append(_fields(state.sampling, draw.position, source, self.filtered))
        self.filtered += self._draws[-1][DrawField.ROOM] >= 0

    def counted(self) -> None:
        """The counts have the changes."""
        for state in self._penalised:
            state.changes.clear()

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """Return draws, rows, items and changes as float64 tables, and masks as int32 words. Each begins at a
        multiple of 16 bytes, since kernels are compiled for that."""
        parts = (
            (self._draws, len(DrawField)),
            (self._rows, len(AdjustmentField)),
            (self._items, len(ItemField)),
            (self._changes, len(ChangeField)),
        )
        flat = [np.array(rows, np.float64).reshape(len(rows), fields) for rows, fields in parts]
        masks = [mask.view(np.float64) for mask in self._masks]
        even = [np.pad(part.ravel(), (0, part.size % 2)) for part in flat]
        numbers = moved(np.concatenate([*even, *masks]), device)
        *starts, end = accumulate((part.size for part in even), initial=0)
        tables = [
            numbers[start : start + part.size].view(part.shape)
            for start, part in zip(starts, flat, strict=True)
        ]
        words = -(-self._vocabulary // 64) * 2
        return [*tables, numbers[end:].view(torch.int32).view(len(self._masks), words)]

    def _adjust(self, draw: Wanted, barred: Iterable[int]) -> None:
        state, sampling = draw.state, draw.state.sampling
        items: dict[int, tuple[int, float]] = {}
        slot = mask = -1
        if state.penalised:
            slot = self._slot(state)
            pushed = len(draw.before) - (draw.position - state.position)
            for token in draw.before[pushed:]:
                items[token] = (items.get(token, (0, 0.0))[0] + 1, 0.0)
        for token, bias in sampling.logit_bias:
            more, shift = items.get(token, (0, 0.0))
            items[token] = (more, shift + bias)
        mask_W = None
        if state.matcher is not None:
            mask, mask_W = len(self._masks), state.matcher.mask()
            self._masks.append(mask_W)
        for token in self._barred(barred, mask_W) if barred else ():
            items[token] = (0, -np.inf)
        begin = len(self._items)
        self._items += [(token, *what) for token, what in items.items() if 0 <= token < self._vocabulary]
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self._rows.append((draw.source, slot, *penalties, mask, begin, len(self._items)))

    def _slot(self, state: SamplingState) -> int:
        slot = self._penalised.get(state)
        if slot is None:
            slot = self._penalised[state] = self._counts.slot_of(state, self._vocabulary)
            self._changes += [
                (slot, token, by) for token, by in state.changes if 0 <= token < self._vocabulary
            ]
        return slot

    def _barred(self, barred: Iterable[int], mask_W: Mask | None) -> list[int]:
        """Return the tokens that may not be drawn; none if nothing else may follow."""
        ids = [token for token in dict.fromkeys(barred) if 0 <= token < self._vocabulary]
        if mask_W is None:
            return ids if len(ids) < self._vocabulary else []
        return ids if (mask_W & ~mask_of(ids, self._vocabulary)).any() else []


def uniform_of(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits."""
    digest = blake2b(
        position.to_bytes(8, "little"), key=seed.to_bytes(8, "little", signed=True), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def token_ids(ids_N: torch.Tensor) -> list[int]:
    values: list[int] = cast("Any", ids_N).tolist()  # torch leaves the type open
    return values


def plain_draws(step: Step) -> "Ints | None":
    """Return a draw for each token of a step in a graph, float64 [T, DrawField]; one that draws nothing is
    greedy. None: a row has a penalty, a bias, a grammar or barred tokens."""
    table_TF = np.zeros((sum(len(row.tokens) for row in step), len(DrawField)))
    table_TF[:, DrawField.ROOM] = NO_ROOM
    end = 0
    for row in step:
        end += len(row.tokens)
        for back in range(row.drafts + 1 if row.sampling_state is not None else 0):
            state, position, at = _sampling_state(row), row.end - back, end - 1 - back
            if not state.plain or state.barred_at(position):
                return None
            table_TF[at] = _fields(state.sampling, position, at, at)
    return table_TF


def moved(numbers: Ints, device: torch.device) -> torch.Tensor:
    """Return the numbers on the device, in one copy for which the host does not wait."""
    host = torch.as_tensor(numbers)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _fields(sampling: Sampling, position: int, source: int, room: int) -> tuple[float, ...]:
    """Return the fields of a draw. `room` is for one with filters."""
    if sampling.temperature <= 0:
        return (source, 0.0, 0.0, NO_ROOM, 0, 1.0, 0)
    scale, least = scale_of(sampling.temperature), least_of(sampling.min_p)
    room_if_filtered = room if _filters(sampling) else NO_ROOM
    uniform = uniform_of(sampling.seed, position)
    return (source, scale, uniform, room_if_filtered, sampling.top_k, sampling.top_p, least)


def _start_masks(rows: Sequence[Row]) -> None:
    """Begin the next mask of each row; that of the next step while its forward pass runs."""
    for row in rows:
        matcher = _sampling_state(row).matcher
        if matcher is not None:
            matcher.start()


def _with_masks(
    rows: Sequence[Row], indices: Iterable[int], deadline_s: float, failed: dict[int, Drawn]
) -> list[int]:
    """Return those of `indices` whose next masks are ready by `deadline_s`, and put the others into
    `failed`."""
    found: list[int] = []
    for index in indices:
        matcher = _sampling_state(rows[index]).matcher
        try:
            if matcher is None or matcher.ready_by(deadline_s):
                found.append(index)
            else:
                failed[index] = Drawn(late=True)
        except RequestError as error:
            failed[index] = Drawn(error=error)
    return found


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _drafts(row: Row) -> tuple[int, ...]:
    return row.tokens[len(row.tokens) - row.drafts :]


def _sampling_state(row: Row) -> SamplingState:
    assert row.sampling_state is not None
    return row.sampling_state
