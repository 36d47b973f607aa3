"""The results of offline calls, with vLLM's names: answers in the order of their prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.workers.messages import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Logprob:
    """`rank` is 1 for the likeliest token; None behind the requested alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer.

    `token_ids` include the stop token and the tokens of a stop string; the text does not, unless requested.
    `logprobs` has an item for each of `token_ids`: the drawn token and the likeliest ones.
    `stop_reason` is the stop string or token that ended it; None for the model's own end and for
    max_tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt; `prompt` is None when it came as token ids.

    `num_cached_tokens` of the prompt needed no computation. `prompt_logprobs`, if requested, are those of
    each token of the prompt, like `logprobs` of an answer; None for the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


def logprobs_of(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob], piece: Callable[[int], bytes]
) -> list[dict[int, Logprob]]:
    """Return the logprobs by token; `piece` returns the bytes of a token: FolderTokenizer.piece."""

    def entry(token: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, piece(token).decode(errors="replace"))

    return [
        {token: entry(token, logprob.logprob, None)}
        | {other: entry(other, logprob, rank) for rank, (other, logprob) in enumerate(logprob.top, start=1)}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
