"""A forced call in the syntax of each family: the grammar takes it whole, no other, and it is understood."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.support.cluster.fake_service import KEEPER
from tests.support.workers.masks import accepts
from tidemill.cluster.edge.chat.formats import FORMS, NUMBER, QUOTE, THOUGHT
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.parts import Call, joined
from tidemill.cluster.edge.chat.request.tool_grammar import forced
from tidemill.cluster.edge.chat.request.tools import Function, Tool
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "enum": ["Emma", "Tom"]},
        "times": {"type": "integer"},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["who", "tags"],
    "additionalProperties": False,
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = [
    Tool(type="function", function=Function(name="look", parameters=SCHEMA)),
    Tool(type="function", function=Function(name="wait", parameters={"type": "object", "properties": {}})),
]
SCHEMAS = {tool.function.name: tool.function.parameters or {} for tool in TOOLS}
PAD = 0
"""The end of sequence: keeper's own is a tag of other families."""

ONCE: dict[str, Any] = {"who": "Emma", "tags": ["a"]}
TWICE: dict[str, Any] = {"who": "Tom", "times": 2, "tags": []}


@cache
def vocabulary(*tags: str) -> tuple[RawTokenizer, Grammars]:
    """keeper's, where each of the tags is one token."""
    raw = RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))
    cast("Any", raw).add_special_tokens([AddedToken(tag, special=tag[1] == "|") for tag in tags])
    with TemporaryDirectory() as folder:
        raw.save(f"{folder}/tokenizer.json")
        grammars = Grammars(Path(folder), raw.get_vocab_size(), {PAD})
        grammars.matcher(Grammar(kind="json_object"))  # reads the folder, which goes
    return raw, grammars


def written(form: str, arguments: Mapping[str, Any], name: str = "look") -> str:
    """A call as such a model writes it, without what surrounds all of them."""
    text = json.dumps(arguments)
    marks = FORMS[form].parameters
    match FORMS[form].body:
        case "xml":
            assert marks is not None
            text = "".join(
                marks.before.format(name=key, is_text=json.dumps(isinstance(value, str)))
                + (value if isinstance(value, str) else json.dumps(value))
                + marks.behind
                for key, value in arguments.items()
            )
        case "python":
            text = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        case "gemma":
            text = ",".join(f"{key}:{json.dumps(value)}" for key, value in sorted(arguments.items()))
            text = text.replace('"', QUOTE)
        case "json" | "channels":
            pass
    how = FORMS[form].written
    return f"{how.name}{name}{how.arguments.replace(NUMBER, '0')}{text}{how.end}"


def around(form: str, *calls: str) -> str:
    how = FORMS[form].written
    return f"{how.before}{(how.between or '').join(calls)}{how.behind}"


def takes(manner: OutputFormat, text: str, *, as_tokens: bool) -> bool:
    """True if the grammar does, token by token, and may end then."""
    tags = () if manner.form is None or not as_tokens else (*manner.form.tags, THOUGHT)
    raw, grammars = vocabulary(*dict.fromkeys(tags))
    added = {added_token.content: token for token, added_token in raw.get_added_tokens_decoder().items()}
    matcher = grammars.matcher(forced(TOOLS, manner, added))
    return accepts(matcher, [*raw.encode(text, add_special_tokens=False).ids, PAD])


def calls_in(manner: OutputFormat, text: str) -> list[tuple[str | None, Any]]:
    parts = open_parser(manner).push(text, last=True)
    calls = [part for part in parts if isinstance(part, Call)]
    assert len(calls) == len(parts), "nothing but calls"
    return [(call.name, json.loads(call.arguments)) for call in joined(calls)]


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forced_call_is_one_that_is_understood(form: str, *, as_tokens: bool) -> None:
    manner = OutputFormat(form=FORMS[form], schemas=SCHEMAS, channels=form == "openai")
    one, two = written(form, ONCE), written(form, TWICE)
    waits = written(form, {}, "wait")
    good: list[tuple[str, list[tuple[str, Any]]]] = [
        (around(form, one), [("look", ONCE)]),
        (around(form, two), [("look", TWICE)]),
        (around(form, waits), [("wait", {})]),
    ]
    if FORMS[form].written.between is not None:
        good.append((around(form, one, waits, two), [("look", ONCE), ("wait", {}), ("look", TWICE)]))
    for text, parsed in good:
        assert takes(manner, text, as_tokens=as_tokens), text
        assert calls_in(manner, text) == parsed
    for bad in (
        "no",
        around(form, written(form, {"who": "Bob", "tags": []})),
        around(form, written(form, {"who": "Emma"})),
        around(form, written(form, {"times": 2, "tags": []})),
        around(form, written(form, {"who": "Emma", "times": "many", "tags": []})),
        around(form, written(form, ONCE, "leave")),
        around(form, one) + " and",
    ):
        assert not takes(manner, bad, as_tokens=as_tokens), bad


@pytest.mark.parametrize("form", FORMS)
def test_one_call_alone_where_several_are_not_wanted(form: str) -> None:
    manner = OutputFormat(form=FORMS[form], schemas=SCHEMAS, calls_max=1, channels=form == "openai")
    one = written(form, ONCE)
    assert takes(manner, around(form, one), as_tokens=True)
    assert not takes(manner, around(form, one, one), as_tokens=True)


@pytest.mark.parametrize(
    ("arguments", "good"),
    [("", True), ("a=1", True), ("b=2", True), ("a=1, b=2", True), ("b=2, a=1", False), (", b=2", False)],
)
def test_commas_of_keywords_that_may_be_left_out(arguments: str, *, good: bool) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [Tool(type="function", function=Function(name="f", parameters=schema))]
    raw, grammars = vocabulary()
    matcher = grammars.matcher(forced(tools, OutputFormat(form=FORMS["pythonic"]), {}))
    tokens = raw.encode(f"[f({arguments})]", add_special_tokens=False).ids
    assert accepts(matcher, [*tokens, PAD]) is good
