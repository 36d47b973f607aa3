"""Logprobs in the reported form, of drawn tokens and of the tokens of a prompt.

They are of the model's own distribution, in float64 and row by row: a row's bits do not depend on other
rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from tidemill.workers.execution.step import Step
from tidemill.workers.messages import TokenLogprob

CHUNK_TOKENS = 32
"""The number of prompt tokens whose logits are in memory together. For all tokens of a step, logits would
take gigabytes."""


def token_logprob(logprobs_V: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Return the logprob of `token` and those of the most likely tokens, by falling logprob and then by id.
    `logprobs_V` is float64."""
    logprobs_V = logprobs_V.cpu()  # the following reads single numbers
    most = min(alternatives, len(logprobs_V))
    top: tuple[tuple[int, float], ...] = ()
    if most:
        least = logprobs_V.topk(most).values[-1]
        ids = (logprobs_V >= least).nonzero().squeeze(1)  # more than `most` when some are equal
        order = logprobs_V[ids].argsort(descending=True, stable=True)[:most]
        top = tuple((int(token), float(logprobs_V[token])) for token in ids[order])
    return TokenLogprob(float(logprobs_V[token]), top)


class Logprobs(NamedTuple):
    """The numbers that `start_logprobs` computes, still on the device."""

    logprobs_NV: torch.Tensor
    own_N: torch.Tensor
    values_NK: torch.Tensor
    ids_NK: torch.Tensor
    equal_N: torch.Tensor
    most: int

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Wait for it, and return `token_logprob` of each row: all in one operation, except rows in which
        equal numbers leave a choice."""
        most = self.most
        parts = (self.own_N, self.values_NK, self.ids_NK, self.equal_N)
        rows = zip(*map(_numbers, parts), strict=True)
        return [
            token_logprob(self.logprobs_NV[index], tokens[index], most)
            if equal and most
            else TokenLogprob(logprob, tuple(zip(ids[:most], values[:most], strict=True)))
            for index, (logprob, values, ids, equal) in enumerate(rows)
        ]


def start_logprobs(logprobs_NV: torch.Tensor, tokens_N: torch.Tensor, alternatives: int) -> Logprobs:
    """Compute the logprobs of tokens (int64) and of the most likely tokens. The host waits for nothing."""
    most = min(alternatives, logprobs_NV.shape[1])
    own_N = logprobs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
    top = logprobs_NV.topk(min(most + 1, logprobs_NV.shape[1]))
    equal_N = (top.values[:, 1:] == top.values[:, :-1]).any(dim=-1)
    return Logprobs(logprobs_NV, own_N, top.values, top.indices, equal_N, most)


def token_logprobs(logprobs_NV: torch.Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Return `token_logprob` of each row."""
    tokens_N = torch.tensor(tokens, device=logprobs_NV.device)
    return start_logprobs(logprobs_NV, tokens_N, alternatives).read(tokens)


def _numbers(numbers: torch.Tensor) -> list[Any]:
    found: list[Any] = cast("Any", numbers).tolist()  # torch leaves the type open
    return found


def scores_of(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden_TH: torch.Tensor, step: Step
) -> list[tuple[TokenLogprob, ...]]:
    """Return the logprobs that `scores` of each row requests, from the hidden states of the step; an empty
    list when no row requests any. `logits` computes those of the model.

    All ranks of a group do this together; only the leader gets a result.
    """
    if not any(row.scores for row in step):
        return []
    found: list[list[TokenLogprob]] = [[] for _ in step]
    for index, targets, hidden_NH in _chunks(hidden_TH, step):
        logits_NV = logits(hidden_NH)
        scores = step[index].scores
        if logits_NV.shape[1] == 0 or scores is None:
            continue
        logprobs_NV = logits_NV.double().log_softmax(dim=-1)
        found[index] += token_logprobs(logprobs_NV, targets, scores.alternatives)
    return [tuple(scores) for scores in found]


def _chunks(hidden_TH: torch.Tensor, step: Step) -> Iterator[tuple[int, tuple[int, ...], torch.Tensor]]:
    """Yield (row, some of its targets, the hidden states that score them)."""
    begin = 0
    for index, row in enumerate(step):
        if row.scores is not None:
            offset, targets, _ = row.scores
            for start in range(0, len(targets), CHUNK_TOKENS):
                some = targets[start : start + CHUNK_TOKENS]
                first = begin + offset + start
                yield index, some, hidden_TH[first : first + len(some)]
        begin += len(row.tokens)
