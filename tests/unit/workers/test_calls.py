"""Calls in both forms: what is one, what its arguments are, and that a forced one is always one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.fake_service import EOS, KEEPER, tokenizer
from tidemill.workers.api.calls import Call, call_of
from tidemill.workers.api.speech import CALL, CALLED, Manner, Speech
from tidemill.workers.api.tools import Function, Tool, forced
from tidemill.workers.grammar import Grammars
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
XML = Manner(calls=True, schemas=SCHEMAS)


def written(name: str, **arguments: str) -> str:
    """As a model of this kind writes it."""
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
    ],
)
def test_xml_that_calls(body: str, arguments: dict[str, object]) -> None:
    call = call_of(body, 4, SCHEMAS)
    assert call is not None
    assert json.loads(call.arguments) == arguments
    assert (call.index, f"<function={call.name}>" in body) == (4, True)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "look",
        '{"name": "look", "arguments": {}}',
        "<function=>\n</function>",
        "<function=look>\nwell</function>",
        "<function=look>\n<parameter=note>x",
        "<function=look>\n<parameter=note>x</parameter> and</function>",
        "<function=look></function> and",
    ],
)
def test_xml_that_calls_nothing_is_words(body: str) -> None:
    assert call_of(body, 0, SCHEMAS) is None
    speech = Speech(XML)
    said = [*speech.push(CALL + body + CALLED, last=False), *speech.push("", last=True)]
    assert not any(isinstance(part, Call) for part in said)


@given(st.text(), st.text(min_size=1, max_size=5))
def test_no_text_breaks_it(text: str, name: str) -> None:
    for body in (text, written(name, note=text), f"<function={name}><parameter={text}>"):
        call = call_of(body, 0, SCHEMAS)
        assert call is None or isinstance(json.loads(call.arguments), dict)


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "</parameter>" not in text))
def test_a_text_comes_as_it_was_written(text: str) -> None:
    call = call_of(written("look", note=text), 0, SCHEMAS)
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
def test_what_is_hardly_a_schema_breaks_nothing(schema: dict[str, Any]) -> None:
    """Tools are a client's. What no grammar can follow is refused where it is compiled."""
    manner = Manner(calls=True, schemas={"f": schema})
    grammar = forced([Tool(type="function", function=Function(name="f", parameters=schema))], manner)
    try:
        mask = Grammars(KEEPER, 896, {EOS}).matcher(grammar).mask()
    except RequestError:
        return
    assert mask.any()
    assert call_of(written("f", a="1", b="x", c="2"), 0, {"f": schema}) is not None


TOOLS = [
    Tool(type="function", function=Function(name=name, parameters=schema)) for name, schema in SCHEMAS.items()
]


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (written("look", who="Emma", tags='["a"]'), True),
        (written("look", who="Tom", note="</p> 5 < 6", tags="[]", maybe="null"), True),
        (written("wait"), True),
        (written("look", who="Bob", tags="[]"), False),
        (written("look", who="Emma"), False),
        (written("look", who="Emma", times="many", tags="[]"), False),
        (written("leave"), False),
    ],
)
@pytest.mark.parametrize("manner", [XML, Manner(calls=True, schemas=SCHEMAS, thinking=True, calls_max=1)])
def test_a_forced_call_is_one_that_is_understood(body: str, manner: Manner, *, good: bool) -> None:
    start = "</think>\n\n" if manner.thinking else ""
    text = f"{start}{CALL}{body}{CALLED}"
    matcher = Grammars(KEEPER, 896, {EOS}).matcher(forced(TOOLS, manner))
    tokens = [*tokenizer().encode(text), EOS]
    taken = 0
    for token in tokens:
        if not matcher.mask()[token]:
            break
        matcher.push(token)
        taken += 1
    assert (taken == len(tokens)) is good
    assert not good or call_of(body, 0, SCHEMAS) is not None
