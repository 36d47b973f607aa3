"""The definition of reported logprobs, one row at a time."""

import torch

from tidemill.workers.messages import TokenLogprob


def token_logprob(logprobs_V: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Return the logprob of `token` and those of the most likely tokens, by falling logprob and then by id.
    `logprobs_V` is float64."""
    most = min(alternatives, len(logprobs_V))
    top: tuple[tuple[int, float], ...] = ()
    if most:
        least = logprobs_V.topk(most).values[-1]
        ids = (logprobs_V >= least).nonzero().squeeze(1)  # more than `most` when some are equal
        order = logprobs_V[ids].argsort(descending=True, stable=True)[:most]
        top = tuple((int(token), float(logprobs_V[token])) for token in ids[order])
    return TokenLogprob(float(logprobs_V[token]), top)
