"""Draw the tokens of a step. Each is a function of its logits, the tokens before it, its seed and its
position, and of nothing else.

The uniform number of a draw is a hash of (seed, position). So a stream that moves to another worker continues
with the same draws, and a guess is compared with the token that would be drawn anyway. Except for the
greatest logit, numbers are float64, and only operations that treat whole rows one by one are used: a row's
bits depend neither on other rows nor on the number of threads.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from time import monotonic
from typing import Any, cast

import numpy as np
import torch

from tidemill.workers.execution.logprobs import token_logprobs
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Drawn, Row
from tidemill.workers.messages import RequestError, Sampling, TokenLogprob

CANDIDATES = 1024
"""Filters first look at this many of the most likely tokens. Nearly always they cut among these, and the
whole vocabulary is not sorted."""

CHUNK_NUMBERS = 1 << 21
"""The size of a chunk of rows in logits, 16 MiB of float64."""

MASKS_S_MAX = 0.02
"""The time that a step waits for the masks of its rows, all together."""

DEVICE_CHUNK_NUMBERS = 1 << 23
"""The same on a device, where each chunk is about fifty launches and waits, whatever its size."""


def draw(logits_NV: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Return what each row draws, and advance the rows' sampling states.

    `logits_NV` (float) holds, row after row, those after each of the row's last `drafts + 1` tokens.
    The first token is drawn as if there were no draft. While a token equals the draft in its position, the
    next one is drawn after it, so the tokens are those of a step without drafts (docs/decisions/0012).
    A row whose mask is not ready in time is late and draws nothing.
    """
    *starts, count = accumulate((row.drafts + 1 for row in rows), initial=0)
    assert len(logits_NV) == count
    best_N = token_ids(logits_NV.argmax(dim=-1))
    tokens: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[TokenLogprob]] = [[] for _ in rows]
    for row in rows:
        _sampling_state(row).rewind(row.end - row.drafts)
    failed: dict[int, Drawn] = {}
    deadline_s = monotonic() + MASKS_S_MAX
    _start_masks(rows)
    drawing = _with_masks(rows, range(len(rows)), deadline_s, failed)
    while drawing:
        positions = [starts[index] + len(tokens[index]) for index in drawing]
        states = [_sampling_state(rows[index]) for index in drawing]
        chosen, reported = _next_tokens(logits_NV, best_N, positions, states)
        for index, state, token, logprob in zip(drawing, states, chosen, reported, strict=True):
            state.push(token)
            tokens[index].append(token)
            if logprob is not None:
                logprobs[index].append(logprob)
        drawing = [index for index in drawing if _matches_draft(rows[index], tokens[index])]
        # A draft without a mask stays unconfirmed: what is drawn so far counts.
        drawing = _with_masks(rows, drawing, deadline_s, {})
    _start_masks(rows)
    return [
        failed.get(index, Drawn(tuple(some), tuple(more)))
        for index, (some, more) in enumerate(zip(tokens, logprobs, strict=True))
    ]


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


def _matches_draft(row: Row, drawn: Sequence[int]) -> bool:
    """Return whether the last drawn token is the draft in its position."""
    return len(drawn) <= row.drafts and row.tokens[len(drawn) - 1 - row.drafts] == drawn[-1]


def _next_tokens(
    logits_NV: torch.Tensor, best_N: Sequence[int], positions: Sequence[int], states: Sequence[SamplingState]
) -> tuple[list[int], list[TokenLogprob | None]]:
    """Choose a token for each state from its row of the logits, `positions[i]`; greedy states take the best
    one.

    The second list has the logprobs of states that ask for them. Chunks of rows bound the memory.
    """
    tokens = [best_N[position] for position in positions]
    logprobs: list[TokenLogprob | None] = [None] * len(positions)
    others = [index for index, state in enumerate(states) if not state.greedy]
    numbers = CHUNK_NUMBERS if logits_NV.device.type == "cpu" else DEVICE_CHUNK_NUMBERS
    size = max(1, numbers // logits_NV.shape[1])
    for start in range(0, len(others), size):
        chunk = others[start : start + size]
        chunk_states = [states[index] for index in chunk]
        chunk_NV = logits_NV[[positions[index] for index in chunk]]
        chosen = _choose(chunk_NV, chunk_states)
        for index, token in zip(chunk, chosen, strict=True):
            tokens[index] = token
        for index, logprob in _logprobs(chunk_NV, chunk_states, chosen):
            logprobs[chunk[index]] = logprob
    return tokens, logprobs


def uniform_of(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits."""
    digest = blake2b(
        position.to_bytes(8, "little"), key=seed.to_bytes(8, "little", signed=True), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _choose(logits_NV: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Return the next token of each row."""
    scores_NV = logits_NV.double()
    for scores_V, state in zip(scores_NV, states, strict=True):
        _penalise(scores_V, state)
        _restrict(scores_V, state)
    tokens = token_ids(scores_NV.argmax(dim=-1))
    random = [index for index, state in enumerate(states) if state.sampling.temperature > 0]
    filtered = [index for index in random if _filters(states[index].sampling)]
    open_ = [index for index in random if not _filters(states[index].sampling)]
    for indices, sample in ((filtered, _sample_filtered), (open_, _sample)):
        if indices:
            samplings = [states[index].sampling for index in indices]
            uniform = [uniform_of(states[index].sampling.seed, states[index].position) for index in indices]
            for index, token in zip(indices, sample(scores_NV[indices], samplings, uniform), strict=True):
                tokens[index] = token
    return tokens


def _penalise(scores_V: torch.Tensor, sampling_state: SamplingState) -> None:
    """Apply the repetition penalty, then the frequency and presence penalties, then the bias, in place."""
    sampling, counts, device = sampling_state.sampling, sampling_state.counts, scores_V.device
    if counts is not None and counts.ids:
        ids = torch.as_tensor(np.array(counts.ids)).to(device)
        times = torch.as_tensor(np.array(counts.counts)).to(device)
        seen = times > 0
        scores = scores_V[ids]
        repeated = seen.clone()
        repeated[: counts.num_prompt] = True
        penalty = sampling.repetition_penalty
        scores = torch.where(repeated, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        scores -= sampling.frequency_penalty * times
        scores -= sampling.presence_penalty * seen
        scores_V[ids] = scores
    for token, bias in sampling.logit_bias:
        if token < len(scores_V):
            scores_V[token] += bias


def _restrict(scores_V: torch.Tensor, sampling_state: SamplingState) -> None:
    """Set the scores of tokens that may not follow to -inf. These are the tokens that would end the answer
    too early, unless the grammar allows nothing else."""
    if sampling_state.matcher is not None:
        may_V = torch.as_tensor(sampling_state.matcher.mask()).to(scores_V.device)
        scores_V.masked_fill_(~may_V, -torch.inf)
    barred = [token for token in sampling_state.barred if token < len(scores_V)]
    if barred:
        kept = scores_V[barred]
        scores_V[barred] = -torch.inf
        if scores_V.max() == -torch.inf:
            scores_V[barred] = kept


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _sample(scores_NV: torch.Tensor, samplings: Sequence[Sampling], uniform: Sequence[float]) -> list[int]:
    """Return the inverse of the cumulative distribution over the ids, at `uniform`."""
    return token_ids(_inverse(_weights(scores_NV, samplings), uniform).squeeze(1))


def _sample_filtered(
    scores_NV: torch.Tensor,
    samplings: Sequence[Sampling],
    uniform: Sequence[float],
    candidates: int = CANDIDATES,
) -> list[int]:
    """Return the inverse of the cumulative distribution after top-k, top-p and min-p, over tokens by falling
    score and then by id, at `uniform`. Each filter looks at the whole distribution."""
    vocabulary = scores_NV.shape[1]
    ids_NC = scores_NV.topk(min(candidates, vocabulary), sorted=False).indices.sort(dim=-1).values
    scores_NC, order_NC = scores_NV.gather(1, ids_NC).sort(dim=-1, descending=True, stable=True)
    ids_NC = ids_NC.gather(1, order_NC)
    weights_NC = _weights(scores_NV, samplings).gather(1, ids_NC)
    cumulative_NC = weights_NC.cumsum(dim=-1)
    ranks_C = torch.arange(ids_NC.shape[1], device=scores_NV.device)
    top_p = [sampling.top_p if sampling.top_p < 1 else torch.inf for sampling in samplings]
    keep_NC = ranks_C < _column([sampling.top_k or vocabulary for sampling in samplings], scores_NV)
    keep_NC &= cumulative_NC - weights_NC < _column(top_p, scores_NV)
    keep_NC &= weights_NC >= weights_NC[:, :1] * _column([params.min_p for params in samplings], scores_NV)
    keep_NC &= weights_NC > 0
    keep_NC[:, 0] = True  # whatever the filters are
    tokens = token_ids(ids_NC.gather(1, _inverse(weights_NC * keep_NC, uniform)).squeeze(1))
    if candidates >= vocabulary:
        return tokens
    # Of equal scores any may be among the candidates: what is kept must lie above the least of them.
    open_N = (keep_NC & (scores_NC == scores_NC[:, -1:])).any(dim=-1)
    rows = [index for index, undecided in enumerate(token_ids(open_N)) if undecided]
    if rows:
        whole = _sample_filtered(
            scores_NV[rows], [samplings[row] for row in rows], [uniform[row] for row in rows], vocabulary
        )
        for row, token in zip(rows, whole, strict=True):
            tokens[row] = token
    return tokens


def _weights(scores_NV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    return (scores_NV / _column([params.temperature for params in samplings], scores_NV)).softmax(dim=-1)


def _inverse(weights_NC: torch.Tensor, uniform: Sequence[float]) -> torch.Tensor:
    """Return [N, 1] int64: the index where the sum of the weights exceeds `uniform` of the total, and never
    one with weight 0."""
    cumulative_NC = weights_NC.cumsum(dim=-1)
    total_N1 = cumulative_NC[:, -1:].contiguous()
    threshold_N1 = _column(uniform, weights_NC) * total_N1
    place_N1 = torch.searchsorted(cumulative_NC, threshold_N1, right=True)
    last_N1 = torch.searchsorted(cumulative_NC, total_N1)
    return torch.minimum(place_N1, last_N1).clamp_(max=weights_NC.shape[1] - 1)  # NaN is after the end


def _logprobs(
    logits_NV: torch.Tensor, states: Sequence[SamplingState], tokens: Sequence[int]
) -> list[tuple[int, TokenLogprob]]:
    """Return (index, logprob of its token) of the rows that ask for it."""
    asking: dict[int, list[int]] = {}
    for index, state in enumerate(states):
        if state.sampling.logprobs is not None:
            asking.setdefault(state.sampling.logprobs, []).append(index)
    found: list[tuple[int, TokenLogprob]] = []
    for alternatives, rows in asking.items():
        logprobs_NV = logits_NV[rows].double().log_softmax(dim=-1)
        reported_rows = token_logprobs(logprobs_NV, [tokens[row] for row in rows], alternatives)
        found += zip(rows, reported_rows, strict=True)
    return found


def _sampling_state(row: Row) -> SamplingState:
    assert row.sampling_state is not None
    return row.sampling_state


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def token_ids(ids_N: torch.Tensor) -> list[int]:
    values: list[int] = cast("Any", ids_N).tolist()  # torch leaves the type open
    return values
