"""Compile grammars and, for each token of an answer, compute the tokens that may follow.

A thin layer over llguidance (docs/decisions/0011). It never gets an end-of-sequence token: those are decided
here.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Lock
from typing import cast

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError

Mask = npt.NDArray[np.bool_]
"""The allowed tokens, `[V]`, with V the width of the model's logits."""

STEP_FUEL_MAX = 200_000
STEP_ITEMS_MAX = 50_000
"""The limit for one mask, which is computed between two steps of all requests. With the limits of
cluster/edge/chat/request/structured.py it ends a mask after about 25 ms."""

LEXER_STATES_MAX = 50_000
"""The limit for one answer; a state takes 1 to 2 kB."""

BLANKS = r"(\n[ \t]{0,40}|[ ])?"
"""The white space between two tokens of JSON: none, a space, or a new line with its indentation. Without a
bound a model can continue with blanks until its answer is cut off."""

ERROR_CHARACTERS_MAX = 400
FIELD = "response_format"


class Matcher:
    """Follows one answer. The answer ends where no token may follow, and where a step exceeds the limits: a
    mask is never empty."""

    def __init__(self, compiled: Callable[[], LLMatcher], vocab_size: int, eos_ids: Collection[int]) -> None:
        self._compiled = compiled
        self._inner = compiled()
        self._eos_ids = frozenset(eos_ids)
        self._end_V = np.zeros(vocab_size, dtype=np.bool_)
        self._end_V[list(eos_ids)] = True
        self._tokens: list[int] = []
        self._fed = 0  # tokens that the library got; all of them, unless the answer has ended

    def mask(self) -> Mask:
        if self._fed < len(self._tokens) or self._inner.is_stopped():
            return self._end_V.copy()
        bits = np.unpackbits(np.frombuffer(self._inner.compute_bitmask(), np.uint8), bitorder="little")
        if self._inner.is_error():
            return self._end_V.copy()
        may_V = np.zeros(len(self._end_V), dtype=np.bool_)
        known = min(len(may_V), len(bits))  # the model may have more rows than its tokenizer has entries
        may_V[:known] = bits[:known]
        return may_V if may_V.any() else self._end_V.copy()

    def push(self, token: int) -> None:
        ended = self._fed < len(self._tokens)
        self._tokens.append(token)
        if not ended and token not in self._eos_ids and self._inner.consume_token(token):
            self._fed += 1

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens`."""
        kept = len(self._tokens) - num_tokens
        assert kept >= 0
        del self._tokens[kept:]
        if self._inner.is_error():  # permanent: the library has no way back
            self._inner = self._compiled()
            self._fed = 0
            while self._fed < kept and self._inner.consume_token(self._tokens[self._fed]):
                self._fed += 1
        elif kept < self._fed:
            done = self._inner.rollback(self._fed - kept)
            assert done, self._inner.get_error()
            self._fed = kept


class Grammars:
    """The grammars of one model. The first one reads its tokenizer: for 150,000 entries that takes a
    second."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted(eos_ids))
        self._reading = Lock()
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> Matcher:
        """Compile a grammar; takes milliseconds, on any thread. Raises RequestError."""
        tokenizer, text = self._read(), _library_text(grammar)
        limits = LLParserLimits(
            step_lexer_fuel=STEP_FUEL_MAX,
            step_max_items=STEP_ITEMS_MAX,
            max_lexer_states=LEXER_STATES_MAX,
            verbose_errors=False,
        )

        def compiled() -> LLMatcher:
            return LLMatcher(tokenizer, text, log_level=0, limits=limits)

        first = compiled()
        first.compute_bitmask()  # fails for a grammar that no text matches
        if first.is_error():
            reason = " ".join(first.get_error().replace("<non-verbose/>", "").split())
            if reason.startswith("NoExtension"):
                reason = "nothing matches it"
            raise _refusal(grammar, reason[:ERROR_CHARACTERS_MAX])
        return Matcher(compiled, self._vocab_size, self._eos_ids)

    def _read(self) -> LLTokenizer:
        path = self._folder / "tokenizer.json"
        with self._reading:
            if self._tokenizer is None:
                try:
                    text = path.read_text(encoding="utf-8")
                    self._tokenizer = LLTokenizer(text, eos_token=list(self._eos_ids))
                except (OSError, ValueError) as error:
                    raise RequestError(
                        f"no grammar can be followed, the model's tokenizer.json is unfit: {error}",
                        param=FIELD,
                    ) from error
            return self._tokenizer


def _library_text(grammar: Grammar) -> str:
    """Return `grammar` in the syntax of llguidance."""
    if len(grammar.text.encode()) > GRAMMAR_BYTES_MAX:
        raise RequestError(f"a grammar has at most {GRAMMAR_BYTES_MAX} bytes: make it shorter", param=FIELD)
    match grammar.kind:
        case "json_object":
            return _schema_text(grammar, '{"type": "object"}')
        case "json_schema":
            return _schema_text(grammar, "{}" if _parsed(grammar) is True else grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "choice":
            parsed = _parsed(grammar)
            choices = cast("list[object]", parsed) if isinstance(parsed, list) else []
            texts = [choice for choice in choices if isinstance(choice, str)]
            if not texts or len(texts) < len(choices):
                raise _refusal(grammar, "give a JSON list of one text or more")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))


def _schema_text(grammar: Grammar, schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": BLANKS})
    except ValueError as error:
        raise _refusal(grammar, str(error)) from error


def _parsed(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, f"it is not JSON: {error}") from error


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"this {grammar.kind} cannot be followed: {reason}", param=FIELD)
