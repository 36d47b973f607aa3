"""Logprobs in the reported form, of drawn tokens and of the tokens of a prompt.

They are of the model's own distribution, in float64 and row by row: a row's bits do not depend on other
rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch

from tidemill.workers.device import HOST
from tidemill.workers.execution.step import Step
from tidemill.workers.messages import TokenLogprob

CHUNK_TOKENS = 32
"""The number of prompt tokens whose logits are in memory together. For all tokens of a step, logits would
take gigabytes."""


class Logprobs(NamedTuple):
    """The numbers that `start_logprobs` computes, still on the device: the logprob of the token, those of the
    most likely tokens, and their ids."""

    numbers_NC: torch.Tensor

    def read(self) -> list[TokenLogprob]:
        """Wait for it. The most likely tokens come by falling logprob and then by id."""
        most = self.numbers_NC.shape[1] // 2
        numbers: list[list[float]] = cast("Any", self.numbers_NC).tolist()  # torch leaves the type open
        return [
            TokenLogprob(own, tuple(zip(map(int, rest[most:]), rest[:most], strict=True)))
            for own, *rest in numbers
        ]


def start_logprobs(logprobs_NV: torch.Tensor, tokens_N: torch.Tensor, alternatives: int) -> Logprobs:
    """Compute the logprobs of tokens (int64) and of the most likely tokens. The host waits for nothing."""
    vocabulary = logprobs_NV.shape[1]
    most = min(alternatives, vocabulary)
    own_N1 = logprobs_NV.gather(1, tokens_N.unsqueeze(1))
    if not most:
        return Logprobs(own_N1)
    top_NK = logprobs_NV.topk(min(most + 1, vocabulary))
    values_NK, ids_NK = top_NK.values[:, :most], top_NK.indices[:, :most]
    if logprobs_NV.device != HOST or bool((top_NK.values[:, 1:] == top_NK.values[:, :-1]).any()):
        # Equal numbers come by their ids. Asking a device whether there are any would wait for it.
        least_N1 = values_NK[:, -1:]
        rank_NV = (logprobs_NV >= least_N1).long() + (logprobs_NV > least_N1)
        rank_NV = rank_NV * vocabulary - torch.arange(vocabulary, device=logprobs_NV.device)
        ids_NK = -rank_NV.topk(most).values % vocabulary
        values_NK, order_NK = logprobs_NV.gather(1, ids_NK).sort(dim=1, descending=True, stable=True)
        ids_NK = ids_NK.gather(1, order_NK)
    return Logprobs(torch.cat([own_N1, values_NK, ids_NK.double()], dim=1))


def start_scores(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden_TH: torch.Tensor, step: Step
) -> list[list[Logprobs]]:
    """Launch the logprobs that `scores` of each row requests, from the hidden states of the step. `logits`
    computes those of the model. The host waits for nothing.

    All ranks of a group do this together; only the leader gets a result.
    """
    found: list[list[Logprobs]] = [[] for _ in step]
    targets = [target for row in step if row.scores is not None for target in row.scores.targets]
    targets_N = torch.tensor(targets, pin_memory=hidden_TH.is_cuda).to(hidden_TH.device, non_blocking=True)
    begin = 0
    for index, alternatives, hidden_NH in _chunks(hidden_TH, step):
        end = begin + len(hidden_NH)
        logits_NV = logits(hidden_NH)
        if logits_NV.shape[1]:
            logprobs_NV = logits_NV.double().log_softmax(dim=-1)
            found[index].append(start_logprobs(logprobs_NV, targets_N[begin:end], alternatives))
        begin = end
    return found


def scores_of(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden_TH: torch.Tensor, step: Step
) -> list[tuple[TokenLogprob, ...]]:
    """Return what `start_scores` launches; an empty list when no row requests any. Only its end waits."""
    if not any(row.scores for row in step):
        return []
    launched = start_scores(logits, hidden_TH, step)
    return [tuple(score for chunk in chunks for score in chunk.read()) for chunks in launched]


def _chunks(hidden_TH: torch.Tensor, step: Step) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (row, alternatives, the hidden states of some of its targets), in the order of targets."""
    begin = 0
    for index, row in enumerate(step):
        if row.scores is not None:
            offset, targets, alternatives = row.scores
            for start in range(0, len(targets), CHUNK_TOKENS):
                first = begin + offset + start
                yield index, alternatives, hidden_TH[first : first + min(CHUNK_TOKENS, len(targets) - start)]
        begin += len(row.tokens)
