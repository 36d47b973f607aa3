"""Call llguidance: from a grammar to a matcher of it, within limits."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tidemill.workers.messages import BLANKS, GRAMMAR_BYTES_MAX, Grammar, RequestError

if TYPE_CHECKING:  # in the type stubs only
    from llguidance._lib import JsonCompileOptions

COMPILE_FUEL_MAX = 1_000_000
"""The limit for the regular expressions of a grammar when it is compiled, about 20 ms."""

STEP_FUEL_MAX = 200_000
STEP_ITEMS_MAX = 50_000
"""The limit for one mask."""

JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": BLANKS, "coerce_one_of": True}
"""Alternatives of `oneOf` that overlap are those of `anyOf`."""

EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

TOO_MANY = "lexer error: too many"
ERROR_CHARACTERS_MAX = 400
FIELD = "response_format"


class Alternatives:
    """The matchers of an answer that follows one of several grammars. It is used as an LLMatcher is.

    One grammar with alternatives would not do: its lexer takes the longest lexeme of any of them, so a `{` of
    one may be lost to a longer text of another.
    """

    def __init__(self, matchers: Sequence[LLMatcher]) -> None:
        self._matchers = matchers
        self._taken = [0] * len(matchers)  # tokens of each, which stops at the first that it refuses
        self._num_tokens = 0
        self._fuelled = True  # by a mask, after the last token

    @property
    def _following(self) -> list[LLMatcher]:
        pairs = zip(self._matchers, self._taken, strict=True)
        return [matcher for matcher, taken in pairs if taken == self._num_tokens]

    def deep_copy(self) -> "Alternatives":
        assert not self._num_tokens
        return Alternatives([matcher.deep_copy() for matcher in self._matchers])

    def compute_bitmask(self) -> bytes:
        """Return the tokens that any of them allows."""
        self._fuelled = True
        masks = [np.frombuffer(matcher.compute_bitmask(), np.uint8) for matcher in self._following]
        return np.bitwise_or.reduce(masks).tobytes()

    def consume_token(self, token: int) -> bool:
        """Take a token where it is allowed. Return whether it is anywhere."""
        if not self._fuelled:
            self.compute_bitmask()
        self._fuelled = False
        for index, matcher in enumerate(self._matchers):
            if self._taken[index] == self._num_tokens and not matcher.is_stopped():
                self._taken[index] += matcher.try_consume_tokens([token])
        took = max(self._taken) > self._num_tokens
        self._num_tokens += took
        return took

    def rollback(self, num_tokens: int) -> bool:
        """Forget the last tokens. Those that refused one of them may go on."""
        self._num_tokens -= num_tokens
        surplus = [max(0, taken - self._num_tokens) for taken in self._taken]
        self._taken = [taken - more for taken, more in zip(self._taken, surplus, strict=True)]
        pairs = zip(self._matchers, surplus, strict=True)
        return all(matcher.rollback(more) for matcher, more in pairs if more)

    def is_stopped(self) -> bool:
        """Return whether no token may follow. At a limit that is not known."""
        return not self.is_error() and all(matcher.is_stopped() for matcher in self._following)

    def is_error(self) -> bool:
        """Return whether one of them has reached a limit. A refused token is no error."""
        return any(matcher.is_error() for matcher in self._matchers)

    def get_error(self) -> str:
        """Return the first error. A matcher that fails at a token that it has allowed lacks states."""
        error = next(matcher.get_error() for matcher in self._matchers if matcher.is_error())
        return f"{TOO_MANY} states: {error}" if "satisfy the grammar" in error else error


LibraryMatcher = LLMatcher | Alternatives


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar, lexer_states: int) -> LibraryMatcher:
    """Compile a grammar and compute its first mask, which fails if no text matches. Its lexers have at most
    `lexer_states`. Raises RequestError."""
    if grammar.otherwise is None:
        return _compile_one(tokenizer, grammar, lexer_states)
    first = _compile_one(tokenizer, grammar, lexer_states // 2)
    try:
        second = _compile_one(tokenizer, grammar.otherwise, lexer_states // 2)
    except RequestError:
        if grammar.otherwise.stand_in is None:
            raise
        second = _compile_one(tokenizer, grammar.otherwise.stand_in, lexer_states // 2)
    return Alternatives([first, second])


def _compile_one(tokenizer: LLTokenizer, grammar: Grammar, lexer_states: int) -> LLMatcher:
    limits = LLParserLimits(
        initial_lexer_fuel=COMPILE_FUEL_MAX,
        step_lexer_fuel=STEP_FUEL_MAX,
        step_max_items=STEP_ITEMS_MAX,
        max_lexer_states=lexer_states,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, _library_text(grammar), log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error():
        reason = error_of(matcher)
        raise refusal(grammar, "nothing matches it" if reason.startswith("NoExtension") else reason)
    return matcher


def read_tokenizer(text: str, eos_ids: list[int]) -> LLTokenizer:
    """Read a `tokenizer.json`. Raises ValueError."""
    return LLTokenizer(text, eos_token=eos_ids)


def error_of(matcher: LibraryMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:ERROR_CHARACTERS_MAX]


def refusal(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"this {grammar.kind} cannot be followed: {reason}", param=FIELD)


def _library_text(grammar: Grammar) -> str:
    """Return `grammar` in the syntax of llguidance."""
    if max(len(grammar.text.encode()), len(grammar.frame.encode())) > GRAMMAR_BYTES_MAX:
        raise RequestError(f"a grammar has at most {GRAMMAR_BYTES_MAX} bytes: make it shorter", param=FIELD)
    text = _answer_text(grammar)
    if not grammar.frame:
        return text
    is_lark = grammar.kind in ("lark", "choice")
    answer = {"lark_grammar": text} if is_lark else json.loads(text)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": grammar.frame}, {**answer, "name": "answer"}]})


def _answer_text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return _schema_text(grammar, '{"type": "object"}')
        case "json_schema":
            return _schema_text(grammar, "{}" if _parsed(grammar) is True else grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(_lark(grammar))
        case "choice":
            parsed = _parsed(grammar)
            choices = cast("list[object]", parsed) if isinstance(parsed, list) else []
            texts = [choice for choice in choices if isinstance(choice, str)]
            if not texts or len(texts) < len(choices):
                raise refusal(grammar, "give a JSON list of one text or more")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))


def _schema_text(grammar: Grammar, schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
    except ValueError as error:
        raise refusal(grammar, str(error)) from error


def _lark(grammar: Grammar) -> str:
    """Return a grammar in Lark's syntax, also one in EBNF with a rule `root`."""
    if EBNF.search(grammar.text) is None:
        return grammar.text
    try:
        return gbnf_to_lark(grammar.text)
    except Exception as error:
        raise refusal(grammar, str(error)) from error


def _parsed(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise refusal(grammar, f"it is not JSON: {error}") from error
