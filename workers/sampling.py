"""Draws the next token of each row: a function of its logits, its seed and its position, and of nothing else.

The uniform number behind a draw is a hash of (seed, position), so a stream that moves to another worker goes
on with the same draws. Probabilities are float64, tokens are ordered by falling logit and then by id, and
each row is padded to a whole number of vector registers, so that its numbers do not depend on the rows beside
it.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch.nn.functional import pad

from tidemill.workers.messages import Sampling

LANES = 64


def draw(logits_NV: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Token ids, one per row of `logits_NV` (float); `positions` are those of the tokens to be drawn."""
    drawn = _ints(logits_NV.argmax(dim=-1))
    rows = [index for index, sampling in enumerate(samplings) if sampling.temperature > 0]
    if rows:
        chosen = [samplings[index] for index in rows]
        uniform = [uniform_of(samplings[index].seed, positions[index]) for index in rows]
        for index, token in zip(rows, _sample(logits_NV[rows], chosen, uniform), strict=True):
            drawn[index] = token
    return drawn


def uniform_of(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(
        position.to_bytes(8, "little"), key=seed.to_bytes(8, "little", signed=True), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _sample(logits_NV: torch.Tensor, samplings: Sequence[Sampling], uniform: Sequence[float]) -> list[int]:
    """Inverse of the cumulative distribution that is left after top-k, top-p and min-p, at `uniform`."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).unsqueeze(1)

    vocabulary = logits_NV.shape[1]
    padded = pad(logits_NV.double(), (0, -vocabulary % LANES), value=-torch.inf)
    scores, tokens = padded.sort(dim=-1, descending=True, stable=True)
    scores = (scores - scores[:, :1]) / column([sampling.temperature for sampling in samplings])
    weights = scores.exp()
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    ranks = torch.arange(padded.shape[1])
    top_k = column([sampling.top_k or vocabulary for sampling in samplings])
    keep = ranks < top_k
    keep &= cumulative - weights < column([sampling.top_p for sampling in samplings]) * total
    keep &= weights >= column([sampling.min_p for sampling in samplings])  # the best token weighs 1
    keep[:, 0] = True  # whatever the filters say
    kept = (weights * keep).cumsum(dim=-1)
    threshold = column(uniform) * kept[:, -1:]
    places = (kept <= threshold).sum(dim=-1, keepdim=True).clamp_(max=padded.shape[1] - 1)
    return _ints(tokens.gather(1, places).squeeze(1))


def _ints(ids_N: torch.Tensor) -> list[int]:
    return [int(token) for token in ids_N]
