"""A fake model on the arena's real bytes, which cannot produce a token that it has not computed.

Its state is a digest of all tokens so far and lies in the state's slot; its KV is a digest per token and lies
in the token's place in its page. A draw digests the state and every KV entry through the page table. A wrong
page, a stale state, a token folded twice or not at all changes that token and all that follow.
"""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

from tidemill.kvstore.layout import Attention, Layout, Linear, PageId, StateId, layout_of
from tidemill.workers.messages import Request
from tidemill.workers.step import Row, Step

VOCABULARY = 251
KV_BYTES = 16
EMPTY = b"\0" * 16

ATTENTION = Attention(kv_heads=1, head_dim=2)
LINEAR = Linear(key_heads=1, value_heads=1, key_dim=2, value_dim=2, conv_width=2)


def fold_layout(page_tokens: int, *, hybrid: bool, extent_bytes_min: int = 256) -> Layout:
    """Space for one KV digest per token and one state digest per state; small extents."""
    layers = (LINEAR, ATTENTION) if hybrid else (ATTENTION,)
    layout = layout_of(layers, page_tokens, extent_bytes_min=extent_bytes_min, granule_bytes=1)
    assert layout.page_bytes == page_tokens * KV_BYTES
    return layout


class FoldRunner:
    def __init__(self, layout: Layout, memory: memoryview, rng: Random, step_s_max: float) -> None:
        self._layout, self._memory = layout, memory
        self._rng, self._step_s_max = rng, step_s_max

    async def run(self, step: Step) -> list[int | None]:
        await asyncio.sleep(self._rng.random() * self._step_s_max)
        drawn = [self._row(row) for row in step]
        await asyncio.sleep(self._rng.random() * self._step_s_max)
        return drawn

    def _row(self, row: Row) -> int | None:
        state = EMPTY if row.read is None else bytes(self._state(row.read))
        for position, token in enumerate(row.tokens, row.start):
            state = _digest(state, token)
            self._kv(row.pages, position)[:] = state if self._layout.hybrid else _digest(EMPTY, token)
        if row.write is not None:
            self._state(row.write)[:] = state
        if row.sampling is None:
            return None
        known = row.start + len(row.tokens)
        kv = b"".join(bytes(self._kv(row.pages, position)) for position in range(known))
        return _draw(state if self._layout.hybrid else EMPTY, kv, row.sampling.seed, known)

    def _kv(self, pages: Sequence[PageId], position: int) -> memoryview:
        size = self._layout.page_tokens
        start = self._layout.page_offset(pages[position // size]) + position % size * KV_BYTES
        return self._memory[start : start + KV_BYTES]

    def _state(self, state: StateId) -> memoryview:
        start = self._layout.state_offset(state)
        return self._memory[start : start + len(EMPTY)]


def expected(request: Request, *, hybrid: bool) -> list[int]:
    """The tokens of `request` by the definition of the fake model, without any cache."""
    tokens = list(request.tokens)
    state, kv = EMPTY, b""
    for token in tokens:
        state = _digest(state, token)
        kv += state if hybrid else _digest(EMPTY, token)
    while len(tokens) < len(request.tokens) + request.max_new_tokens:
        token = _draw(state if hybrid else EMPTY, kv, request.sampling.seed, len(tokens))
        tokens.append(token)
        if token in request.stop_token_ids:
            break
        state = _digest(state, token)
        kv += state if hybrid else _digest(EMPTY, token)
    return tokens[len(request.tokens) :]


def _digest(state: bytes, token: int) -> bytes:
    return blake2b(token.to_bytes(4, "little"), key=state, digest_size=16).digest()


def _draw(state: bytes, kv: bytes, seed: int, position: int) -> int:
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return blake2b(state + kv, key=key, digest_size=8).digest()[0] % VOCABULARY
