"""Compute the tokens that may follow each token of an answer, by its grammar.

A layer over llguidance (decision 11). It never gets an end-of-sequence token: those are decided here.
"""

import asyncio
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import monotonic, thread_time

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.execution.grammar_library import (
    FIELD,
    TOO_MANY,
    LibraryMatcher,
    compile_grammar,
    error_of,
    read_tokenizer,
)
from tidemill.workers.execution.grammar_trial import NICE, GrammarTrial
from tidemill.workers.execution.mask_pool import MaskPool, lower_priority
from tidemill.workers.messages import Grammar, RequestError
from tidemill.workers.models.model_files import read_text

Mask = npt.NDArray[np.int32]
"""The allowed tokens, `[W]`: a bit for each, the lowest first, as the library and the kernels have them. An
even number of words covers the model's logits, and no bit beyond those is set."""

QUICK_S_MAX = 0.002
"""A mask below this is quick. The rows of answers with quick masks join a step before its masks are known."""

UNPROVEN_S = 4 * QUICK_S_MAX
FADING = 0.7
"""The expected time of a mask starts as if a slow one had come before, and forgets slow ones by this factor
a token."""

ANSWER_S_MAX = 5.0
TOKEN_S_MAX = 0.005
"""The most CPU time of an answer's masks, with its increase for each token."""

LEXER_STATES = (500, 2_000, 8_000)
"""The limits of one answer. It begins with the first one and gets more when it needs them. A state takes 1 to
40 kB."""

LEXER_STATES_MAX = 64_000
"""The limit for all answers of a worker together."""

LIMIT_ERRORS = ("oo many", "max is", "fuel", "limit", "too big", "too large")
"""Parts of the errors of llguidance at its limits. With others no text follows."""

CACHED_MAX = 32
"""The number of compiled grammars, and of refusals, that a worker keeps."""


def mask_of(tokens: Collection[int], vocab_size: int) -> Mask:
    """Return the mask of these tokens of a vocabulary."""
    may_V = np.zeros(-(-vocab_size // 64) * 64, np.bool_)
    may_V[list(tokens)] = True
    return np.packbits(may_V, bitorder="little").view(np.int32)


def has(mask_W: Mask, token: int) -> bool:
    return bool(mask_W[token // 32] >> (token % 32) & 1)


class LexerMemory:
    """Counts the lexer states that answers may have, over all answers of a worker."""

    def __init__(self, states_max: int = LEXER_STATES_MAX) -> None:
        self._left = states_max
        self._lock = Lock()

    def take(self, owner: object, states: int) -> Callable[[], object]:
        """Take `states`, until the result is called or `owner` is gone. Raises RequestError if they are not
        left."""
        with self._lock:
            if states > self._left:
                raise RequestError(
                    "the grammars of other answers hold the memory that this one needs: retry later, or send "
                    "a simpler one",
                    status=429,
                    code="grammar_memory",
                    param=FIELD,
                )
            self._left -= states
        give_back = weakref.finalize(owner, self._give_back, states)
        give_back.atexit = False
        return give_back

    def _give_back(self, states: int) -> None:
        with self._lock:
            self._left += states


class LexerShare:
    """The lexer states that one answer may have."""

    def __init__(self, memory: LexerMemory) -> None:
        """Take the first limit. Raises RequestError."""
        self._memory = memory
        self._taken = [memory.take(self, LEXER_STATES[0])]

    @property
    def states(self) -> int:
        return LEXER_STATES[len(self._taken) - 1]

    def grow(self) -> bool:
        """Take the next limit. Return False after the last one. Raises RequestError."""
        if len(self._taken) == len(LEXER_STATES):
            return False
        self._taken.append(self._memory.take(self, LEXER_STATES[len(self._taken)] - self.states))
        return True

    def close(self) -> None:
        for give_back in self._taken:
            give_back()


class Matcher:
    """Follows one answer. The answer ends where no token may follow: a mask is never empty.

    Tokens and masks reach the library on a thread of `pool`, from `start` until the mask is ready. `push` and
    `rewind` wait for it.
    """

    def __init__(
        self,
        compiled: Callable[[int], LibraryMatcher],
        vocab_size: int,
        eos_ids: Collection[int],
        pool: MaskPool[Mask] | None = None,
        memory: LexerMemory | None = None,
    ) -> None:
        """Create a matcher. `compiled` takes the limit of lexer states. Without a `pool` masks are computed
        where they are asked for."""
        self._compiled = compiled
        self._pool = pool
        self._share = LexerShare(memory or LexerMemory())
        self._inner: LibraryMatcher | None = None
        self._end_W = mask_of(eos_ids, vocab_size)
        self._room_W = np.full_like(self._end_W, -1)
        if vocab_size % 64:
            self._room_W[-2:] = mask_of(range(vocab_size % 64), 64)
        self._tokens: list[int] = []
        self._fed = 0  # tokens that the library has; the rest follows with the next mask
        self._ended = False  # the library cannot take the token at `_fed`: the answer had ended there
        self._spent_s = 0.0
        self._expected_s = UNPROVEN_S
        self._careful = False  # only a mask gives the lexer new fuel: many tokens without masks can fail
        self._closed = False
        self._mask: Future[Mask] | None = None  # after all tokens
        self.on_ready: Callable[[], None] | None = None  # called on another thread, after a slow mask

    def start(self) -> None:
        """Begin to compute the next mask, if that has not begun."""
        if self._mask is not None:
            return
        if self._pool is None:
            self._mask = Future()
            try:
                self._mask.set_result(self._next())
            except RequestError as error:
                self._mask.set_exception(error)
            return
        quick = self.is_quick
        self._mask = self._pool.submit(self._next, self._spent_s, quick=quick)
        if not quick and self.on_ready is not None:
            self._mask.add_done_callback(lambda _: self.on_ready and self.on_ready())

    @property
    def is_quick(self) -> bool:
        """True if its masks have been quick for a while."""
        return self._expected_s <= QUICK_S_MAX

    def may_launch(self, *, in_flight: bool) -> bool:
        """Return whether a row of it can join the next step. Otherwise the row sits out until its mask is
        ready and no step of it is in flight."""
        if self.is_quick:
            return True
        return not in_flight and (self._mask is None or self._mask.done())

    def ready_by(self, deadline_s: float) -> bool:
        """Wait for the next mask until `deadline_s` (monotonic). Return whether it is ready. Raises the
        RequestError that ends the answer."""
        self.start()
        assert self._mask is not None
        if not self._mask.done():
            with suppress(TimeoutError):
                self._mask.exception(max(0.0, deadline_s - monotonic()))
        if not self._mask.done():
            self._expected_s = max(self._expected_s, UNPROVEN_S)
            return False
        error = self._mask.exception()
        if error is not None:
            raise error
        return True

    def mask(self) -> Mask:
        """Return the allowed tokens. Raises RequestError if they cannot be computed within the limits."""
        self.start()
        assert self._mask is not None
        return self._mask.result()

    def push(self, token: int) -> None:
        self._settle()
        self._tokens.append(token)

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens`."""
        if not num_tokens:
            return
        self._settle()
        kept = len(self._tokens) - num_tokens
        assert kept >= 0
        del self._tokens[kept:]
        if self._inner is not None and not self._inner.is_error() and kept < self._fed:
            done = self._inner.rollback(self._fed - kept)
            assert done, self._inner.get_error()
            self._fed = kept
        self._ended = False

    def close(self) -> None:
        """Give back the memory: the answer has ended. A mask that is being computed is of no use."""
        self._closed = True
        self._share.close()
        if self._mask is None or self._mask.done():
            self._inner = None

    def _settle(self) -> None:
        if self._mask is not None:
            self._mask.exception()
            self._mask = None

    def _next(self) -> Mask:
        if self._closed:
            return self._end_W
        began_s = thread_time()
        try:
            return self._within_memory()
        finally:
            took_s = thread_time() - began_s
            self._spent_s += took_s
            self._expected_s = max(took_s, FADING * self._expected_s)

    def _within_memory(self) -> Mask:
        limit_s = ANSWER_S_MAX + TOKEN_S_MAX * len(self._tokens)
        if self._spent_s > limit_s:
            raise RequestError(
                f"to follow this grammar takes too long, more than {limit_s:.1f} s in {len(self._tokens)} "
                "tokens: simplify it, for example with fewer patterns or alternatives",
                code="grammar_too_slow",
                param=FIELD,
            )
        while True:
            mask = self._follow()
            if mask is not None:
                return mask
            self._grow()

    def _follow(self) -> Mask | None:
        """Feed the tokens, then return the mask; None if the lexer needs more states."""
        inner = self._inner
        if inner is None or (inner.is_error() and not self._ended):  # an error is permanent: begin again
            inner = self._inner = self._compiled(self._share.states)
            self._fed = 0
        replaying = self._careful and self._fed + 1 < len(self._tokens)
        while self._fed < len(self._tokens) and not self._ended:
            token = self._tokens[self._fed]
            if replaying:
                inner.compute_bitmask()
            if not has(self._end_W, token) and inner.consume_token(token):
                self._fed += 1
                continue
            if inner.is_error() and not self._over(inner):
                return None
            if inner.is_error() and not self._careful:
                self._careful = True
                self._inner = None
                return self._follow()
            self._ended = True
        if self._ended or inner.is_stopped():
            return self._end_W
        words = np.frombuffer(inner.compute_bitmask(), np.int32)
        if inner.is_error():
            return self._end_W if self._over(inner) else None
        mask_W = np.zeros_like(self._room_W)
        known = min(len(mask_W), len(words))  # the model may have more rows than its tokenizer has entries
        np.bitwise_and(words[:known], self._room_W[:known], out=mask_W[:known])
        return mask_W if mask_W.any() else self._end_W

    def _over(self, inner: LibraryMatcher) -> bool:
        """Return True if the text cannot go on, and False if the lexer needs more states. Raises RequestError
        at another limit: the answer would end as if it were complete."""
        reason = error_of(inner)
        if TOO_MANY in reason:  # states, or parts of them
            return False
        if not any(limit in reason for limit in LIMIT_ERRORS):
            return True
        raise RequestError(
            f"this grammar has become too complex after {len(self._tokens)} tokens: {reason}; "
            "of many optional properties make some required, or leave some out",
            code="grammar_too_complex",
            param=FIELD,
        )

    def _grow(self) -> None:
        """Begin again with more lexer states. Raises RequestError if there are none."""
        if not self._share.grow():
            raise RequestError(
                f"this grammar needs more than {self._share.states} states of its lexer after "
                f"{len(self._tokens)} tokens: simplify its patterns and numbers",
                code="grammar_too_complex",
                param=FIELD,
            )
        self._inner = None
        self._ended = False


class Grammars:
    """The grammars of one model. The first one reads its tokenizer: for 150,000 entries that takes a
    second."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Collection[int], threads: int = 1) -> None:
        """Create the grammars. `threads` compute masks that steps wait for."""
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted(eos_ids))
        self._reading = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._trial = GrammarTrial(self._path, list(self._eos_ids), LEXER_STATES[-1])
        self._pool = MaskPool[Mask](threads)
        self._memory = LexerMemory()
        self._compiled: dict[Grammar, LibraryMatcher | RequestError] = {}  # the last ones used, and refusals
        self._compiling = Lock()
        self._compiler = ThreadPoolExecutor(1, "grammar", lower_priority, (NICE,))
        self._end_trial = weakref.finalize(self, self._trial.close)  # also without `close`

    def close(self) -> None:
        """End the child process and the threads. No mask is computed any more."""
        self._end_trial()
        self._pool.close()
        self._compiler.shutdown(wait=False)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Compile a grammar; takes milliseconds, on any thread. Answers with the same grammar copy the
        compiled one. Raises RequestError."""
        tokenizer = self._read()
        with self._compiling:
            first = self._known(grammar)
            if first is None:
                try:
                    self._trial.refuse(grammar)
                    first = compile_grammar(tokenizer, grammar, LEXER_STATES[0])
                except RequestError as error:
                    first = error
                self._compiled[grammar] = first
                if len(self._compiled) > CACHED_MAX:
                    del self._compiled[next(iter(self._compiled))]
        return self._following(grammar, first)

    async def matcher_soon(self, grammar: Grammar) -> Matcher:
        """The same from an event loop: grammars are compiled one at a time on a thread of their own."""
        first = self._known(grammar)
        if first is not None:
            return self._following(grammar, first)
        return await asyncio.get_running_loop().run_in_executor(self._compiler, self.matcher, grammar)

    def _known(self, grammar: Grammar) -> LibraryMatcher | RequestError | None:
        found = self._compiled.pop(grammar, None)
        if found is not None:
            self._compiled[grammar] = found  # used last
        return found

    def _following(self, grammar: Grammar, first: LibraryMatcher | RequestError) -> Matcher:
        if isinstance(first, RequestError):
            raise RequestError(str(first), param=first.param, status=first.status, code=first.code)
        tokenizer = self._tokenizer
        assert tokenizer is not None

        def compiled(lexer_states: int) -> LibraryMatcher:
            if lexer_states == LEXER_STATES[0]:
                return first.deep_copy()
            return compile_grammar(tokenizer, grammar, lexer_states)

        return Matcher(compiled, self._vocab_size, self._eos_ids, self._pool, self._memory)

    def _read(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = read_tokenizer(read_text(self._path), list(self._eos_ids))
                except (OSError, ValueError, TidemillError) as error:
                    raise RequestError(
                        f"no grammar can be followed, the model's tokenizer.json is unfit: {error}",
                        param=FIELD,
                    ) from error
            return self._tokenizer
