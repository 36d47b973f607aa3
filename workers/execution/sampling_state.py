"""The inputs of an answer's draws except logits: its sampling, and the tokens before them."""

from array import array
from collections.abc import Iterable

from tidemill.workers.execution.grammar import Matcher
from tidemill.workers.messages import Request


class Counts:
    """Counts how often each token occurs in the answer. Ids are in the order of their first occurrence; the
    first `num_prompt` of them are the prompt's."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self.ids = array("q", dict.fromkeys(prompt))
        self.counts = array("q", [0]) * len(self.ids)
        self.num_prompt = len(self.ids)
        self._positions = {token: position for position, token in enumerate(self.ids)}

    def add(self, token: int, change: int) -> None:
        position = self._positions.setdefault(token, len(self.ids))
        if position == len(self.ids):
            self.ids.append(token)
            self.counts.append(0)
        self.counts[position] += change


class SamplingState:
    """The answer of one request, draw by draw. It is created when the request arrives. Then only the leader's
    runner uses it, on its thread."""

    def __init__(self, request: Request, matcher: Matcher | None = None) -> None:
        """Create the state. `matcher` has no token yet. Tokens that were drawn before a loss count as
        drawn."""
        sampling = request.sampling
        self.sampling = sampling
        self.matcher = matcher
        self._start = len(request.tokens) - request.drawn
        self._stop_ids = request.stop_token_ids
        self._tokens: list[int] = []
        repetition = sampling.repetition_penalty != 1
        self.counts: Counts | None = None
        if repetition or sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = Counts(request.tokens[: self._start] if repetition else ())
        self._bare = (
            self.counts is None and matcher is None and sampling.logprobs is None and not sampling.logit_bias
        )
        for token in request.tokens[self._start :]:
            self.push(token)
        if matcher is not None:
            matcher.start()

    def close(self) -> None:
        """Give back what its grammar holds: the answer has ended."""
        if self.matcher is not None:
            self.matcher.close()

    @property
    def position(self) -> int:
        """The position of the next draw."""
        return self._start + len(self._tokens)

    @property
    def greedy(self) -> bool:
        """True if the next draw is the most likely token, and nothing else is requested."""
        return self._bare and self.sampling.temperature <= 0 and not self.barred

    def greedy_at(self, position: int) -> bool:
        """Return whether a draw at `position`, now or later, is the most likely token."""
        bars = bool(self._stop_ids) and position - self._start < self.sampling.min_tokens
        return self._bare and self.sampling.temperature <= 0 and not bars

    def drawn_at(self, position: int, token: int) -> int:
        """Record that `token` was drawn at `position`, and return it."""
        self.rewind(position)
        self.push(token)
        return token

    @property
    def barred(self) -> tuple[int, ...]:
        """The tokens that may not be next, because they would end the answer too early."""
        return self._stop_ids if len(self._tokens) < self.sampling.min_tokens else ()

    def push(self, token: int) -> None:
        """Record that `token` was drawn."""
        self._tokens.append(token)
        if self.counts is not None:
            self.counts.add(token, 1)
        if self.matcher is not None:
            self.matcher.push(token)

    def rewind(self, position: int) -> None:
        """Forget the tokens at `position` and after it: the step that drew them was discarded. Those before
        it are known."""
        assert self._start <= position <= self.position
        void = self._tokens[position - self._start :]
        if not void:
            return
        del self._tokens[position - self._start :]
        if self.counts is not None:
            for token in void:
                self.counts.add(token, -1)
        if self.matcher is not None:
            self.matcher.rewind(len(void))
