"""Schemas as libraries make them: what cannot be enforced is named, and the rest is a grammar."""

import json
from functools import cache
from typing import Any

import pytest

from tests.support.cluster.fake_service import KEEPER
from tidemill.cluster.edge.chat.request.schema import FORMATS, UNENFORCED, enforced
from tidemill.workers.execution.grammar_library import compile_grammar, read_tokenizer
from tidemill.workers.messages import Grammar, RequestError

TEXT: dict[str, Any] = {"type": "string"}
A: dict[str, Any] = {"a": {}}


def of(**wanted: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    return {"type": "object", "properties": {"a": wanted}, "required": ["a"], "additionalProperties": False}


@cache
def vocabulary() -> Any:  # noqa: ANN401 - the library has no name for it here
    return read_tokenizer((KEEPER / "tokenizer.json").read_text(), [1])


def compiles(schema: dict[str, Any]) -> None:
    compile_grammar(vocabulary(), Grammar(kind="json_schema", text=json.dumps(schema)), 8000)


def tagged(**members: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Return an object that requires its first member."""
    return {
        "type": "object",
        "properties": members,
        "required": [*members][:1],
        "additionalProperties": False,
    }


OPEN_ONE: dict[str, Any] = {"type": "object", "properties": {"x": TEXT}, "required": ["x"]}
NUMBER: dict[str, Any] = {"type": "number"}
OVERLAPPING: list[list[dict[str, Any]]] = [
    [TEXT, {"type": "string", "maxLength": 3}],
    [{"type": "integer"}, NUMBER],
    [TEXT, {"type": ["string", "null"]}],
    [{"const": "a"}, TEXT],
    [{"const": "a"}, {"enum": ["b", "a"]}],
    [tagged(kind={"const": "a"}), tagged(kind={"enum": ["a", "b"]})],
    [tagged(kind=TEXT), tagged(kind={"const": "a"})],
    [{"type": "object", "properties": {"kind": {"const": kind}}} for kind in "ab"],
    [OPEN_ONE, {"type": "object", "properties": {"y": TEXT}, "required": ["y"]}],
    [{"const": index} for index in range(70)] + [TEXT],
]
DISTINCT: list[list[dict[str, Any]]] = [
    [TEXT],
    [TEXT, NUMBER, {"type": "null"}, {"type": "array", "items": TEXT}],
    [{"const": 1}, TEXT],
    [{"const": index, "title": str(index)} for index in range(90)],
    [{"enum": ["a", "b"]}, {"enum": ["c", None]}],
    [tagged(kind={"const": kind}, x=TEXT) for kind in "abc"],
    [tagged(kind={"const": "a"}), tagged(x=TEXT, kind={"const": "b"})],
    [tagged(kind={"type": "integer"}), tagged(kind=TEXT)],
    [tagged(x=TEXT), tagged(y=TEXT)],
]
VALUES: dict[str, Any] = {"uniqueItems": True, "minContains": 1, "maxContains": 2, "$dynamicRef": "#a"}
ODD = ("path", "binary", "password", "byte")
CASES: list[tuple[dict[str, Any], list[str]]] = [
    *((of(**{word: VALUES.get(word, {})}), [f"p.properties.a.{word}"]) for word in sorted(UNENFORCED)),
    *((of(**TEXT, format=form), []) for form in sorted(FORMATS)),
    *((of(**TEXT, format=form), ["p.properties.a.format"]) for form in ODD),
    (of(type=["string", "null"], format="uri-reference"), ["p.properties.a.format"]),
    (of(format="regex"), ["p.properties.a.format"]),
    (of(type="integer", format="int32"), []),
    (of(**TEXT, pattern="^(?!b).*$"), ["p.properties.a.pattern"]),
    (of(**TEXT, pattern="[0-9]+"), []),
    (of(anyOf=[{"type": "array", "items": {"not": {}}}, TEXT]), ["p.properties.a.anyOf[0].items.not"]),
    *((of(oneOf=parts), ["p.properties.a.oneOf"]) for parts in OVERLAPPING),
    *((of(oneOf=parts), []) for parts in DISTINCT),
    (
        {
            **of(
                oneOf=[{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                discriminator={"propertyName": "kind"},
            ),
            "$defs": {"cat": tagged(kind={"const": "cat"}), "dog": tagged(kind={"const": "dog"})},
        },
        [],
    ),
    (
        {
            **of(oneOf=[{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]),
            "$defs": {"x": TEXT, "y": {"$ref": "#/$defs/x"}},
        },
        ["p.properties.a.oneOf"],
    ),
    (of(enum=[{"not": 1, "format": "path"}]), []),
    ({"properties": {"not": TEXT, "if": TEXT, "format": TEXT}, "additionalProperties": False}, []),
    ({**of(**{"$ref": "#/$defs/b"}), "$defs": {"b": {"format": "path"}}}, ["p.$defs.b.format"]),
]


@pytest.mark.parametrize(("schema", "left_out"), CASES)
def test_what_cannot_be_enforced_is_named_and_the_rest_compiles(
    schema: dict[str, Any], left_out: list[str]
) -> None:
    found = enforced(schema, "p")
    assert list(found.left_out) == left_out
    compiles(found.schema)
    if not left_out:
        assert enforced(schema, "p", strict=True).schema == found.schema == schema
        return
    with pytest.raises(RequestError, match="cannot be enforced") as refused:
        enforced(schema, "p", strict=True)
    assert refused.value.param == left_out[0]


def test_keyword_that_asks_for_nothing_is_not_named() -> None:
    assert enforced(of(type="array", uniqueItems=False), "p", strict=True).schema == of(type="array")


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": A}, True),
        ({"properties": A, "additionalProperties": True}, False),
        ({"properties": A, "patternProperties": A}, False),
        ({"properties": A, "anyOf": [{"required": ["a"]}]}, False),
        ({"allOf": [{"properties": A}], "properties": A}, False),
        (dict[str, Any](type="object"), False),
    ],
)
def test_object_with_properties_has_no_others_unless_its_schema_mentions_them(
    schema: dict[str, Any], *, closed: bool
) -> None:
    kept = {**schema, "additionalProperties": False} if closed else schema
    assert enforced(schema, "p").schema == kept
    assert enforced({"items": schema}, "p").schema == {"items": kept}
    assert enforced({"$defs": {"x": schema}}, "p").schema == {"$defs": {"x": kept}}
    assert enforced({"anyOf": [schema]}, "p").schema == {"anyOf": [kept]}


def test_branches_of_an_object_stay_open() -> None:
    schema: dict[str, Any] = {"properties": A, "anyOf": [{"properties": A}, {"properties": A}]}
    assert enforced(schema, "p").schema == schema
