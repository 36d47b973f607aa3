"""Answers drawn from masks: however such a text is cut, its calls are what the schemas allow. FUZZ_EXAMPLES
draws more."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.support.workers.masks import allowed
from tests.unit.cluster.edge.chat.request.test_tool_grammar import format_of
from tests.unit.cluster.edge.chat.spoken import PAD, parsed, vocabulary
from tidemill.cluster.edge.chat.formats import FORMS, NUMBER, THINKING
from tidemill.cluster.edge.chat.output.parts import Call, Text
from tidemill.cluster.edge.chat.request.answer_grammar import behind_thought, words_or_calls
from tidemill.cluster.edge.chat.request.tool_grammar import enforceable, forced
from tidemill.cluster.edge.chat.request.tools import Function, Tool
from tidemill.workers.execution.grammar import Matcher
from tidemill.workers.messages import Grammar

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
TOKENS_MAX, CLOSING_MAX = 60, 60
VALUES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "b<"},
    {"type": "string", "pattern": "^(a|/)\n?$"},
    {"type": "string", "format": "uuid"},
    {"enum": ["Emma", "<"]},
    {"const": "a"},
    {"enum": ["a", 1, None]},
    {"type": ["integer", "string"], "maxLength": 2},
    {"allOf": [{"type": "string"}, {"minLength": 2}]},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"k": {"maxLength": 1}}}]},
    {"type": "array", "items": {"$ref": "#/$defs/short"}, "minItems": 1, "maxItems": 2},
    {"type": "integer", "minimum": 3},
    {},
]
SHORT = {"short": {"type": "string", "maxLength": 2}}
VALIDATOR: Any = Draft202012Validator
BLANK = Grammar(kind="regex", text=r"\s{1,3}[a-z<]{1,9}")


def tools_of(rng: Random) -> list[Tool]:
    tools: list[Tool] = []
    for name in rng.sample(["look", "lo", "wait"], 2):
        values = {parameter: rng.choice(VALUES) for parameter in ("n", rng.choice(["at", "note"]))}
        schema = {"type": "object", "properties": values, "required": ["n"], "$defs": SHORT}
        tools.append(Tool(type="function", function=Function(name=name, parameters=schema)))
    return enforceable(tools)[0]


def drawn(
    rng: Random, matcher: Matcher, encode: Callable[[str], list[int]], snippets: Sequence[str]
) -> list[int] | None:
    """Return an answer: any tokens, and pieces of snippets as tokens or letter by letter, where they are
    allowed. None: it has not ended."""
    tokens: list[int] = []

    def planned() -> list[int]:
        snippet = rng.choice(snippets)
        return encode(snippet) if rng.random() < 0.7 else [encode(letter)[0] for letter in snippet]

    while len(tokens) < TOKENS_MAX + CLOSING_MAX:
        may = allowed(matcher)
        if may[PAD] and rng.random() < 0.5:
            return tokens
        plan = planned() if rng.random() < 0.5 or len(tokens) > TOKENS_MAX else []
        any_token = rng.choice(np.flatnonzero(may).tolist())
        for token in plan if plan and may[plan[0]] else [any_token]:
            if token == PAD or not allowed(matcher)[token]:
                break
            tokens.append(token)
            matcher.push(token)
    return None


@pytest.mark.parametrize("form", FORMS)
def test_fuzz_sampled_answers_are_parsed_as_their_schemas_have_them(form: str) -> None:
    marks, how = FORMS[form].parameters, FORMS[form].written
    ended = 0
    for example in range(EXAMPLES):
        rng = Random(f"{form} {example}")
        manner = format_of(form, rng.choice(["none", "open", "free"]), forced=rng.random() < 0.7)
        tags = (*manner.tags, *FORMS[form].tags, *THINKING["qwen3"].tags)
        known = vocabulary(*tags if rng.random() < 0.3 else ())
        tools = tools_of(rng)
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        manner = replace(manner, schemas=schemas)
        if manner.forced:
            grammar = behind_thought(forced(tools, manner, known.added), manner, known.added)
        else:
            grammar = words_or_calls(BLANK, tools, manner, known.added)
        snippets = [how.end, how.behind, *THINKING["qwen3"].tags, "</think>\n\n", *FORMS[form].tags]
        snippets += [how.name.replace(NUMBER, "0"), "look", '{"n": "', '"}', "]", "a", "b<", "/", "\n"]
        snippets += [] if marks is None else [marks.behind, *marks.ends, marks.closes]
        matcher = known.grammars.matcher(grammar)
        tokens = drawn(rng, matcher, known.encode, [*filter(None, snippets)])
        matcher.close()
        text = "" if tokens is None else known.raw.decode(tokens, skip_special_tokens=False)
        if tokens is None or "\ufffd" in text:
            continue
        parts = parsed(manner, text)
        cuts = [0, *sorted(rng.sample(range(len(text) + 1), min(len(text), 3))), len(text)]
        assert parsed(manner, *text) == parts, text
        assert parsed(manner, *(text[start:end] for start, end in pairwise(cuts))) == parts, text
        found = [part for part in parts if isinstance(part, Call)]
        words = "".join(part.text for part in parts if isinstance(part, Text))
        assert bool(found) is not bool(words), text
        for call in found:
            assert VALIDATOR(schemas[call.name or ""]).is_valid(json.loads(call.arguments)), text
        if words:
            assert words[0].isspace(), text
        ended += 1
    assert ended
