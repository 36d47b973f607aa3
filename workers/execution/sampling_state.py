"""The inputs of an answer's draws except logits: its sampling, and the tokens before them."""

from collections.abc import Sequence

from tidemill.kernels.draw.tables import PROMPT
from tidemill.workers.execution.grammar import Matcher
from tidemill.workers.messages import Request


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
        self.penalised = repetition or bool(sampling.presence_penalty or sampling.frequency_penalty)
        # (token, what is added to its count) since the last draw
        self.changes: list[tuple[int, int]] = []
        if repetition:
            self.changes += ((token, PROMPT) for token in set(request.tokens[: self._start]))
        # Without a limit on the first tokens, the draws are from the logits as they are.
        adjusted = self.penalised or sampling.logit_bias or sampling.bad_words
        self.plain = not adjusted and matcher is None
        self.pools = request.pools
        # The next draw needs no token before it, except by the logits.
        self.bare = self.plain and sampling.logprobs is None and not self.pools
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

    def drawn_at(self, position: int, token: int) -> int:
        """Record that `token` was drawn at `position`, and return it."""
        self.rewind(position)
        self.push(token)
        return token

    def barred_at(self, position: int, before: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the tokens that may not be drawn at `position`, now or later: they would end the answer too
        early, or complete a bad word. `before` are tokens of the answer up to there that count as drawn."""
        barred = self._stop_ids if position - self._start < self.sampling.min_tokens else ()
        if not self.sampling.bad_words:
            return barred
        known = position - self._start - len(before)
        reach = max(map(len, self.sampling.bad_words)) - 1
        last = (*self._tokens[max(0, known - reach) : known], *before)
        return barred + tuple(
            word[-1]
            for word in self.sampling.bad_words
            if len(word) <= len(last) + 1 and last[len(last) + 1 - len(word) :] == word[:-1]
        )

    def push(self, token: int) -> None:
        """Record that `token` was drawn."""
        self._tokens.append(token)
        if self.penalised:
            self.changes.append((token, 1))
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
        if self.penalised:
            self.changes += ((token, -1) for token in void)
        if self.matcher is not None:
            self.matcher.rewind(len(void))
