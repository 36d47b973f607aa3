"""A fake model on the arena's real bytes, which cannot produce a token that it has not computed.

Its state is a digest of all tokens so far, in the slot of the state. Its KV is a digest per token, at the
position of the token in its page. With windows there is also a digest per token in its window page, and the
KV of a token digests all of these in its window. A draw digests the state and every KV entry through the page
table. A wrong page, a stale state, a freed window page, and a token folded twice or not at all change that
token and all later ones.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from random import Random

from tests.support.sim.in_order import InOrder
from tidemill.kvstore.layout import (
    Attention,
    CheckpointId,
    Layout,
    Linear,
    PageId,
    StateDtype,
    StateId,
    Window,
    WindowId,
    layout_of,
)
from tidemill.workers.execution.step import PENDING, Drawn, PagesLost, Row, Scores, Step
from tidemill.workers.messages import Request, TokenLogprob

VOCABULARY = 251
KV_BYTES = 16
EMPTY = b"\0" * 16

ATTENTION = Attention(kv_heads=1, head_dim=2)
LINEAR = Linear(key_heads=1, value_heads=1, key_dim=2, value_dim=2, conv_width=2)


def fold_layout(
    page_tokens: int,
    *,
    hybrid: bool,
    window: int = 0,
    extent_bytes_min: int = 256,
    checkpoint_dtype: StateDtype | None = None,
    page_slices: int = 1,
) -> Layout:
    """Return a layout of small extents with a KV digest per token, and a digest per state if `hybrid`.

    With `window` it also has a digest per token in the window. Checkpoints in bfloat16 have a digest too.
    Of 2 slices of a page each has half of a digest.
    """
    paged = [replace(ATTENTION, head_dim=ATTENTION.head_dim // page_slices)] * page_slices
    layers = (LINEAR, *paged) if hybrid else paged
    windows = [Window(kv_heads=1, head_dim=2, tokens=window)] if window else []
    layout = layout_of(
        (*layers, *windows),
        page_tokens,
        checkpoint_dtype=checkpoint_dtype,
        page_slices=page_slices,
        extent_bytes_min=extent_bytes_min,
        granule_bytes=1,
    )
    assert layout.page_bytes == page_tokens * KV_BYTES
    return layout


class Broke(Exception):
    """A step fails on purpose, or because it needs the tokens of a failed one."""


def sound(_: Step) -> Exception | None:
    return None


class FoldRunner:
    """Runs steps of the fake model.

    Any exception except those of `breaks` fails the whole run, even if the engine survives it.
    """

    def __init__(
        self,
        layout: Layout,
        memory: memoryview,
        rng: Random,
        step_s_max: float,
        vocabulary: int = VOCABULARY,
        breaks: Callable[[Step], Exception | None] = sound,
        guesses_max: int = 0,
    ) -> None:
        """A step for which `breaks` returns an exception leaves garbage wherever it may write.

        With guesses each row leaves garbage behind its last token, as far as it has memory.
        """
        self._layout, self._memory = layout, memory
        self._rng, self._step_s_max = rng, step_s_max
        self._vocabulary = vocabulary
        self._order = InOrder[list[Drawn]]()
        self._breaks = breaks
        self._guesses_max = guesses_max
        self._last: dict[str, int] | None = {}  # drawn by each row of the step before; None: it failed

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        return self._order.add(lambda: self._run(step))

    async def _run(self, step: Step) -> list[Drawn]:
        await asyncio.sleep(self._rng.random() * self._step_s_max)
        last, self._last = self._last, None
        error = self._breaks(step)
        if error is None and last is None and any(PENDING in row.tokens for row in step):
            error = Broke("the tokens of the step before are lost")
        if error is not None:
            self._spoil(step)
            raise error
        for arrival in (arrival for row in step for arrival in row.arrivals):
            await self._arrive(arrival, step)
        try:
            drawn = [self._row(row, (last or {}).get(row.sequence_id)) for row in step]
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({"message": "a wrong step", "exception": error})
            raise
        self._last = {
            row.sequence_id: result.tokens[-1]
            for row, result in zip(step, drawn, strict=True)
            if result.tokens
        }
        await asyncio.sleep(self._rng.random() * self._step_s_max)
        return drawn

    async def _arrive(self, arrival: Future[None], step: Step) -> None:
        try:
            await asyncio.wrap_future(arrival)
        except PagesLost:
            self._spoil(step)
            raise

    def _row(self, row: Row, last: int | None) -> Drawn:
        """Write all positions of the row, including wrong guesses, before anything is drawn."""
        known = len(row.tokens) - row.drafts
        if row.restores is not None:
            assert row.read is not None
            self._state(row.read)[:] = self._saved(row.restores)
        state = EMPTY if row.read is None else bytes(self._state(row.read))
        states: list[bytes] = []
        for position, token in enumerate(row.tokens, row.start):
            if token == PENDING:
                assert last is not None, "a token that no row of the step before drew"
                token = last  # noqa: PLW2901  the pending token
            state = _digest(state, token)
            states.append(state)
            entry = state if self._layout.has_states else _digest(EMPTY, token)
            if self._layout.has_windows:
                self._view(row.windows, position)[:] = entry
                seen = range(max(0, position + 1 - self._layout.window_tokens), position + 1)
                entry = _folded([bytes(self._view(row.windows, at)) for at in seen])
            self._write_kv(row.pages, position, entry)
        for depth, slot in row.writes:
            self._state(slot)[:] = states[depth - row.start - 1]
        for slot, checkpoint in row.saves:
            self._saved(checkpoint)[:] = self._state(slot)
        scores = () if row.scores is None else tuple(self._scores(row, row.scores, states))
        drawn: list[int] = []
        if row.sampling_state is None:
            return Drawn(scores=scores)
        for count in range(known, len(row.tokens) + 1):
            position = row.start + count
            kv = self._kv_before(row.pages, position)
            after = states[count - 1] if self._layout.has_states else EMPTY
            drawn.append(_draw(after, kv, row.sampling_state.sampling.seed, position, self._vocabulary))
            if count == len(row.tokens) or drawn[-1] != row.tokens[count]:
                break
        return Drawn(tuple(drawn), scores=scores, guesses=tuple(self._guesses(row, drawn)))

    def _guesses(self, row: Row, drawn: Sequence[int]) -> Iterator[int]:
        """Guess the next tokens. With a small vocabulary some guesses are right."""
        last = row.end - row.drafts + len(drawn) - 1
        for position in range(last, min(last + self._guesses_max, len(row.pages) * self._layout.page_tokens)):
            self._write_kv(row.pages, position, b"\xee" * KV_BYTES)
            yield (drawn[-1] + position) % self._vocabulary

    def _scores(self, row: Row, scores: Scores, states: Sequence[bytes]) -> Iterator[TokenLogprob]:
        kv = self._kv_before(row.pages, row.end)
        for index, target in enumerate(scores.targets, scores.offset):
            after = states[index] if self._layout.has_states else EMPTY
            yield _score(after, kv[: (row.start + index + 1) * KV_BYTES], target, scores.alternatives)

    def _spoil(self, step: Step) -> None:
        for row in step:
            for position in range(row.start, row.end):
                self._write_kv(row.pages, position, b"\xee" * KV_BYTES)
                if self._layout.has_windows:
                    self._view(row.windows, position)[:] = b"\xee" * KV_BYTES
            for _, slot in row.writes:
                self._state(slot)[:] = b"\xee" * len(EMPTY)
            for _, checkpoint in row.saves:
                self._saved(checkpoint)[:] = b"\xee" * len(EMPTY)

    def _kv(self, pages: Sequence[PageId], position: int) -> list[memoryview]:
        """Return the parts of the KV of a token, one in each slice."""
        size, slice_bytes = self._layout.page_tokens, self._layout.slice_bytes
        page = self._layout.page_offset(pages[position // size])
        starts = (page + start for start in (0, *accumulate(slice_bytes[:-1])))
        num_bytes = KV_BYTES // len(slice_bytes)
        parts = (start + position % size * num_bytes for start in starts)
        return [self._memory[part : part + num_bytes] for part in parts]

    def _write_kv(self, pages: Sequence[PageId], position: int, entry: bytes) -> None:
        parts = self._kv(pages, position)
        for number, part in enumerate(parts):
            part[:] = entry[number * len(part) : (number + 1) * len(part)]

    def _kv_before(self, pages: Sequence[PageId], end: int) -> bytes:
        """Return the KV of the tokens [0, end)."""
        size = self._layout.page_tokens
        if len(self._layout.slice_bytes) > 1:
            return b"".join(part for position in range(end) for part in self._kv(pages, position))
        starts = (self._layout.page_offset(page) for page in pages[: -(-end // size)])
        sizes = (KV_BYTES * min(size, end - first) for first in range(0, end, size))
        return b"".join(
            self._memory[at : at + num_bytes] for at, num_bytes in zip(starts, sizes, strict=True)
        )

    def _view(self, windows: Sequence[WindowId], position: int) -> memoryview:
        size = self._layout.page_tokens
        start = self._layout.window_offset(windows[position // size]) + position % size * KV_BYTES
        return self._memory[start : start + KV_BYTES]

    def _state(self, state: StateId) -> memoryview:
        start = self._layout.state_offset(state)
        return self._memory[start : start + len(EMPTY)]

    def _saved(self, checkpoint: CheckpointId) -> memoryview:
        start = checkpoint * self._layout.saved_stride_bytes
        return self._memory[start : start + len(EMPTY)]


class _Text:
    """The state and KV of all tokens so far, without a cache."""

    def __init__(self, *, hybrid: bool, window: int) -> None:
        self.state, self.kv = EMPTY, b""
        self._hybrid, self._window = hybrid, window
        self._entries: list[bytes] = []

    def add(self, token: int) -> None:
        entry = _digest(self.state, token)
        if self._hybrid:
            self.state = entry
        self._entries.append(entry)
        self.kv += _folded(self._entries[-self._window :]) if self._window else entry


def expected(request: Request, *, hybrid: bool, vocabulary: int = VOCABULARY, window: int = 0) -> list[int]:
    """Return the tokens of `request` by the definition of the fake model."""
    tokens = list(request.tokens)
    text = _Text(hybrid=hybrid, window=window)
    for token in tokens:
        text.add(token)
    while len(tokens) < len(request.tokens) + request.max_new_tokens:
        token = _draw(text.state, text.kv, request.sampling.seed, len(tokens), vocabulary)
        tokens.append(token)
        if token in request.stop_token_ids:
            break
        text.add(token)
    return tokens[len(request.tokens) :]


def expected_scores(request: Request, *, hybrid: bool, window: int = 0) -> list[TokenLogprob]:
    """Return the prompt logprobs of `request` by the definition of the fake model."""
    found: list[TokenLogprob] = []
    text = _Text(hybrid=hybrid, window=window)
    alternatives = request.sampling.prompt_logprobs or 0
    for token, target in zip(request.tokens[: request.to_score], request.tokens[1:], strict=False):
        text.add(token)
        found.append(_score(text.state, text.kv, target, alternatives))
    return found[request.scored :]


def _score(state: bytes, kv: bytes, target: int, alternatives: int) -> TokenLogprob:
    likely = blake2b(state + kv, digest_size=8).digest()
    return TokenLogprob(
        -float(likely[0] ^ target & 255), tuple((likely[1], 0.0) for _ in range(alternatives))
    )


def _folded(seen: Sequence[bytes]) -> bytes:
    return blake2b(b"".join(seen), digest_size=KV_BYTES).digest()


def _digest(state: bytes, token: int) -> bytes:
    return blake2b(token.to_bytes(4, "little"), key=state, digest_size=16).digest()


def _draw(state: bytes, kv: bytes, seed: int, position: int, vocabulary: int) -> int:
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return blake2b(state + kv, key=key, digest_size=8).digest()[0] % vocabulary
