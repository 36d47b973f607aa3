"""Calls in XML: what is one, and what its arguments are."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import EOS, KEEPER
from tests.support.workers.masks import allowed
from tidemill.cluster.edge.chat.formats import CALL, CALLED, FORMS
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat, OutputParser
from tidemill.cluster.edge.chat.output.parts import Call, joined
from tidemill.cluster.edge.chat.output.tool_call_parser import Schemas
from tidemill.cluster.edge.chat.request.tool_grammar import forced
from tidemill.cluster.edge.chat.request.tools import Function, Tool
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import RequestError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "enum": ["Emma", "Tom"]},
        "note": {"type": "string"},
        "times": {"type": "integer"},
        "tags": {"$ref": "#/$defs/tags"},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["who", "tags"],
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
}
SCHEMAS = {"look": SCHEMA, "wait": {}}
XML = OutputFormat(form=FORMS["qwen3_coder"], schemas=SCHEMAS)


def call_of(body: str, schemas: Schemas = SCHEMAS) -> Call | None:
    """Return the call between the tags, which are parsed letter by letter."""
    speech = OutputParser(replace(XML, schemas=schemas))
    parsed = [part for char in CALL + body + CALLED for part in speech.push(char, last=False)]
    calls = joined(part for part in [*parsed, *speech.push("", last=True)] if isinstance(part, Call))
    assert len(calls) <= 1
    return calls[0] if calls else None


def written(name: str, **arguments: str) -> str:
    """Return a call as a model of this kind writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<function={name}>\n{inside}</function>\n"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (written("wait"), {}),
        (written("look", who="Emma", tags="[]"), {"who": "Emma", "tags": []}),
        (written("look", times="3", note="3"), {"times": 3, "note": "3"}),
        (written("look", times="three"), {"times": "three"}),
        (written("look", maybe="True", tags=' ["a", "b"] '), {"maybe": True, "tags": ["a", "b"]}),
        (written("look", maybe="None", note="None"), {"maybe": None, "note": "None"}),
        (written("look", note="a <b> c\n\n</p> \u00e9"), {"note": "a <b> c\n\n</p> \u00e9"}),
        (written("unknown", any="7"), {"any": "7"}),
        ("<function=wait></function>", {}),
        ("<function=wait>\n", {}),
        ("<function=look><parameter=note>x</parameter>", {"note": "x"}),
        ("<function=look>\n<parameter=note>x", {"note": "x"}),
        ("<function=look>\n<parameter=times>3", {"times": 3}),
        ("<function=look>\n<parameter=note>", {}),
        ("<function=look>\n<parameter=note>x</parameter> and</function>", {"note": "x"}),
    ],
)
def test_xml_that_calls(body: str, arguments: dict[str, object]) -> None:
    call = call_of(body)
    assert call is not None
    assert json.loads(call.arguments) == arguments
    assert f"<function={call.name}>" in body


@pytest.mark.parametrize(
    "body",
    [
        "",
        "look",
        '{"name": "look", "arguments": {}}',
        "<function=>\n</function>",
        "<function=look>\nwell</function>",
    ],
)
def test_xml_that_calls_nothing_is_words(body: str) -> None:
    assert call_of(body) is None


def test_long_text_is_streamed_except_its_end() -> None:
    speech = OutputParser(XML)
    assert speech.push(CALL + "<function=look><parameter=note>\n", last=False) == [
        Call(0, "look", '{"note": "')
    ]
    assert speech.push('a "b"\n', last=False) == [Call(0, None, 'a \\"b\\"')]
    assert speech.push("c\n</para", last=False) == [Call(0, None, "\\nc")]
    assert speech.push("meter>", last=False) == [Call(0, None, '"')]
    assert speech.push("</function>\n", last=False) == [Call(0, None, "}")]
    assert speech.push(CALLED, last=True) == []


def test_one_that_is_cut_short_is_no_json() -> None:
    speech = OutputParser(XML)
    parsed = speech.push(CALL + written("look", who="Emma", note="to do")[:-25], last=True)
    [call] = joined(part for part in parsed if isinstance(part, Call))
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(call.arguments)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(min_size=1, max_size=5))
def test_no_text_breaks_it(text: str, name: str) -> None:
    for body in (text, written(name, note=text), f"<function={name}><parameter={text}>"):
        assume(CALLED not in body)
        call = call_of(body)
        assert call is None or isinstance(json.loads(call.arguments), dict)


WRITABLE = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: "</parameter>" not in text and CALLED not in text
)


@given(WRITABLE)
def test_text_comes_as_it_was_written(text: str) -> None:
    call = call_of(written("look", note=text))
    assert call is not None
    assert json.loads(call.arguments) == {"note": text}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "required": 3},
        {"properties": {"a": True, "b": None, "c": {"enum": 5}, "d": {"enum": []}}, "required": ["a"]},
        {"properties": {"a": {"enum": ["x", 1]}, 'q"<>\n': {"type": "string"}, "e": {"enum": ['"\\ \n']}}},
        {"properties": {"a": {"type": ["string", "null"]}, "b": {"const": 1}}, "$defs": {"x": {}}},
    ],
)
def test_odd_schemas_break_nothing(schema: dict[str, Any]) -> None:
    """Tools are a client's. What no grammar can follow is refused where it is compiled."""
    manner = replace(XML, schemas={"f": schema})
    grammar = forced([Tool(type="function", function=Function(name="f", parameters=schema))], manner, {})
    try:
        mask = allowed(Grammars(KEEPER, 896, {EOS}).matcher(grammar))
    except RequestError:
        return
    assert mask.any()
    assert call_of(written("f", a="1", b="x", c="2"), {"f": schema}) is not None
