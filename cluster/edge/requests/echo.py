"""The echo of a prompt before its completion: its text and the logprobs of its tokens."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from tidemill.cluster.edge.chat.output.detokenizer import Growth, Scored
from tidemill.workers.messages import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is the client's, or that of its token ids. `alternatives` is the number of logprobs per token;
    None: none. `alone`: the answer is not returned."""

    text: str
    tokens: Sequence[int]
    alternatives: int | None
    alone: bool


class Echo:
    """Puts a prompt before the first growth of an answer, and shifts the answer's offsets behind it."""

    def __init__(self, prompt: Prompt, piece: Callable[[int], bytes]) -> None:
        """`piece` returns the bytes of a token: FolderTokenizer.piece."""
        self._prompt = prompt
        self._piece = piece
        self._begun = False

    def add(self, growth: Growth, logprobs: Sequence[TokenLogprob]) -> Growth:
        """Return the growth with the echo; `logprobs` are those of the prompt, from its second token on."""
        prompt = self._prompt
        if prompt.alone:
            growth = Growth(text="", num_tokens=0, finish="length")
        scored = tuple(replace(score, start=len(prompt.text) + score.start) for score in growth.scored)
        if self._begun:
            return structs.replace(growth, scored=scored)
        self._begun = True
        if prompt.alternatives is not None:
            scores = scores_of(prompt.tokens, logprobs, prompt.alternatives, self._piece)
            scored = (*scores, *scored)
        return structs.replace(growth, text=prompt.text + growth.text, scored=scored)


def scores_of(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    alternatives: int,
    piece: Callable[[int], bytes],
) -> list[Scored]:
    """Return all tokens of a prompt with their alternatives; the first token has no logprob."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    found: list[Scored] = []
    start = 0
    for token, logprob in zip(tokens, (None, *logprobs), strict=True):
        scores = None if logprob is None else TokenLogprob(logprob.logprob, logprob.top[:alternatives])
        found.append(Scored(token, start, scores))
        start += len(decoder.decode(piece(token)))
    return found
