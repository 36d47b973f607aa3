"""The text of one growing answer: decoded tokens, cut at stop strings, with their logprobs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidemill.cluster.edge.chat.text import StopScanner
from tidemill.cluster.edge.chat.tokenizer import StreamDecoder
from tidemill.workers.messages import FinishReason, Request, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The client's conditions for the end of an answer, and whether the text includes it.

    Stop strings count once `min_tokens` tokens precede the one that completes them.
    `stop_token_ids` are the client's own, without the model's end of sequence.
    """

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    scores_stop: bool = False  # the stop token has a logprob, though the text does not show it


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the text with its logprob. `start` is the offset of its characters in the answer. The first
    token of a prompt has no logprob."""

    token: int
    start: int
    logprob: TokenLogprob | None


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The addition of some tokens to an answer.

    `num_tokens` includes those of a stop string and a stop token; `scored` has only those whose text shows.
    `logprob` is the sum over all of `num_tokens`. `stop` is the client's string or token that ended it.
    """

    text: str
    num_tokens: int
    scored: tuple[Scored, ...] = ()
    logprob: float = 0.0
    finish: FinishReason | None = None
    stop: str | int | None = None


class Answer:
    """The text of one answer so far; no I/O.

    text     shown ........ | held back | not decoded yet
    tokens   . . . . . . . . . . . . . . . . . . . . . . .
    scored   passed on ..... | waiting: starts behind what is shown
    """

    def __init__(self, request: Request, decoder: StreamDecoder, ending: Ending) -> None:
        self._stop_token_ids = request.stop_token_ids
        self._decoder = decoder
        self._ending = ending
        self._scanner = StopScanner(ending.stops, include=ending.include_stop)
        self._num_tokens = 0
        self._decoded_chars = 0
        self._shown_chars = 0
        self._waiting = deque[Scored]()

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], finish: FinishReason | None
    ) -> Growth:
        """Add tokens; `logprobs` has an item for each, or none at all."""
        stop: str | int | None = None
        num_tokens = len(tokens)
        hidden: int | None = None  # a stop token without its text
        if finish == "stop" and tokens and tokens[-1] in self._stop_token_ids:
            stop = tokens[-1] if tokens[-1] in self._ending.stop_token_ids else None
            if not self._ending.include_stop:
                hidden, tokens = tokens[-1], tokens[:-1]
        texts: list[str] = []
        for position, token in enumerate(tokens):
            if logprobs:
                self._waiting.append(Scored(token, self._decoded_chars, logprobs[position]))
            texts.append(self._text_of(token))
            if self._scanner.stop is not None:
                num_tokens, finish, stop = position + 1, "stop", self._scanner.stop
                break
        if finish:
            texts.append(self._scanner.end())
        text = "".join(texts)
        self._shown_chars += len(text)
        whole = finish is not None and self._scanner.stop is None
        if whole and hidden is not None and logprobs and self._ending.scores_stop:
            self._waiting.append(Scored(hidden, self._decoded_chars, logprobs[-1]))
        return Growth(
            text=text,
            num_tokens=num_tokens,
            scored=self._shown(whole=whole),
            logprob=sum(logprob.logprob for logprob in logprobs[:num_tokens]),
            finish=finish,
            stop=stop,
        )

    def _text_of(self, token: int) -> str:
        self._num_tokens += 1
        text = self._decoder.push(token)
        self._decoded_chars += len(text)
        return self._scanner.push(text, may_stop=self._num_tokens > self._ending.min_tokens)

    def _shown(self, *, whole: bool) -> tuple[Scored, ...]:
        """Return the waiting tokens whose text shows by now: all of them in a `whole` text that was not
        cut."""
        shown: list[Scored] = []
        while self._waiting and (whole or self._waiting[0].start < self._shown_chars):
            shown.append(self._waiting.popleft())
        return tuple(shown)
