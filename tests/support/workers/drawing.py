"""Answers drawn from seeded noise: straight on, or with guesses on trial, void steps and migrations."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from tidemill.kernels.dispatch import REFERENCE
from tidemill.workers.execution.grammar import Matcher
from tidemill.workers.execution.sampler import Sampler
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Drawn, Row
from tidemill.workers.messages import Request, Sampling, TokenLogprob

_samplers = defaultdict[int, Sampler](lambda: Sampler(REFERENCE))  # by the size of the vocabulary


def draw(logits_NV: torch.Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Draw by the definitions of the operators."""
    return _samplers[logits_NV.shape[1]].draw(logits_NV, rows)


@dataclass(frozen=True)
class Noise:
    """A model whose logits are a function of the last three tokens; `liked` raises some of them."""

    vocabulary: int
    seed: int = 0
    scale: float = 2.0
    liked: Mapping[int, float] = field(default_factory=dict)

    def logits_V(self, tokens: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *tokens[-3:])) % (1 << 62))
        logits_V = self.scale * torch.randn(self.vocabulary, generator=generator)
        for token, more in self.liked.items():
            logits_V[token] += more
        return logits_V


def row_of(sampling_state: SamplingState, drafts: Sequence[int] = (), position: int | None = None) -> Row:
    """A row that draws its first token at `position`, that of `draws` if none is given."""
    return Row(
        sequence_id="",
        tokens=(0, *drafts),
        start=(sampling_state.position if position is None else position) - 1,
        pages=(),
        read=None,
        writes=(),
        drafts=len(drafts),
        sampling_state=sampling_state,
    )


def request_of(sampling: Sampling, prompt: Sequence[int] = (3, 1, 2), stop: Sequence[int] = ()) -> Request:
    return Request(
        request_id="", tokens=tuple(prompt), max_new_tokens=1, sampling=sampling, stop_token_ids=tuple(stop)
    )


def draw_once(logits_NV: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token a row, each of a sequence of its own."""
    sampling_state = [
        SamplingState(request_of(sampling, (0,) * position))
        for sampling, position in zip(samplings, positions, strict=True)
    ]
    return [row_drawn.tokens[0] for row_drawn in draw(logits_NV, list(map(row_of, sampling_state)))]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


def answer_of(
    model: Noise, request: Request, length: int, matcher: Callable[[], Matcher] | None = None
) -> Answer:
    """Straight on, token by token, to a stop token or to `length`."""
    sampling_state, answer = SamplingState(request, matcher() if matcher else None), Answer()
    while not ended(request, answer, length):
        context = [*request.tokens, *answer.tokens]
        _take(
            request, answer, draw(model.logits_V(context).unsqueeze(0), [row_of(sampling_state)])[0], length
        )
    return answer


def troubled_answer_of(
    model: Noise,
    request: Request,
    truth: Sequence[int],
    rng: Random,
    matcher: Callable[[], Matcher] | None = None,
) -> Answer:
    """The same with guesses on trial, half of them right; with steps that are void; with moves to another
    worker."""
    sampling_state, answer = SamplingState(request, matcher() if matcher else None), Answer()
    start = len(request.tokens)
    while not ended(request, answer, len(truth)):
        done = len(answer.tokens)
        if rng.random() < 0.1:
            moved = replace(
                request, tokens=(*request.tokens, *answer.tokens), drawn=request.drawn + len(answer.tokens)
            )
            sampling_state = SamplingState(moved, matcher() if matcher else None)
        drafts = [
            token if rng.random() < 0.8 else rng.randrange(model.vocabulary)
            for token in truth[done : done + rng.randrange(5)]
        ]
        context = [*request.tokens, *answer.tokens, *drafts]
        logits_NV = torch.stack(
            [model.logits_V(context[:end]) for end in range(start + done, len(context) + 1)]
        )
        (drawn,) = draw(logits_NV, [row_of(sampling_state, drafts, start + done)])
        if rng.random() < 0.8:  # else the step was void
            _take(request, answer, drawn, len(truth))
    return answer


def ended(request: Request, answer: Answer, length: int) -> bool:
    return len(answer.tokens) >= length or any(
        token in request.stop_token_ids for token in answer.tokens[-1:]
    )


def _take(request: Request, answer: Answer, drawn: Drawn, length: int) -> None:
    for place, token in enumerate(drawn.tokens):
        if ended(request, answer, length):
            break
        answer.tokens.append(token)
        answer.logprobs += drawn.logprobs[place : place + 1]
