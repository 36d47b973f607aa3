"""A forced call in the syntax of each family: the grammar takes it whole, no other, and it is understood."""

from typing import Any

import pytest

from tests.unit.cluster.edge.chat.spoken import around, plain, spoken, vocabulary, written
from tidemill.cluster.edge.chat.formats import FORMS, THOUGHT
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.request.tool_grammar import forced
from tidemill.cluster.edge.chat.request.tools import Function, Tool

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
ONCE: dict[str, Any] = {"who": "Emma", "tags": ["a"]}
TWICE: dict[str, Any] = {"who": "Tom", "times": 2, "tags": []}


def takes(manner: OutputFormat, text: str, *, as_tokens: bool) -> bool:
    words = vocabulary(*(*manner.tags, THOUGHT) if as_tokens else ())
    return words.takes(forced(TOOLS, manner, words.added), text)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forced_call_is_one_that_is_understood(form: str, *, as_tokens: bool) -> None:
    manner = OutputFormat(form=FORMS[form], schemas=SCHEMAS, channels=form == "openai")
    one, two = written(form, ONCE), written(form, TWICE)
    waits = written(form, {}, "wait")
    once, twice, wait = ("look", plain(ONCE)), ("look", plain(TWICE)), ("wait", "{}")
    good = [(around(form, one), [once]), (around(form, two), [twice]), (around(form, waits), [wait])]
    if FORMS[form].written.between is not None:
        good.append((around(form, one, waits, two), [once, wait, twice]))
    for text, calls in good:
        assert takes(manner, text, as_tokens=as_tokens), text
        assert spoken(manner, text) == ("", "", calls), "nothing but calls"
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
    grammar = forced(tools, OutputFormat(form=FORMS["pythonic"]), {})
    assert vocabulary().takes(grammar, f"[f({arguments})]") is good
