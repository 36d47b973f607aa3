"""Call llguidance: from a grammar to a matcher of it, within limits."""

import json
import re
from typing import TYPE_CHECKING, cast

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

ERROR_CHARACTERS_MAX = 400
FIELD = "response_format"


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar, lexer_states: int) -> LLMatcher:
    """Compile a grammar and compute its first mask, which fails if no text matches. Its lexer has at most
    `lexer_states`. Raises RequestError."""
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


def error_of(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:ERROR_CHARACTERS_MAX]


def refusal(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"this {grammar.kind} cannot be followed: {reason}", param=FIELD)


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
