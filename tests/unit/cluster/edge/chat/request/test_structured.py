"""Three dialects of clients become one grammar; what is meaningless is refused by name, and what of a schema
cannot be enforced is named."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import KEEPER
from tidemill.cluster.edge.chat.request.schema import FORMATS, UNENFORCED, enforced
from tidemill.cluster.edge.chat.request.structured import (
    FORM_OF,
    GRAMMAR_BYTES_MAX,
    LARK_BYTES_MAX,
    MEMBERS_MAX,
    PATTERN_BYTES_MAX,
    SCHEMA_DEPTH_MAX,
    grammar_of,
)
from tidemill.workers.execution.grammar_library import compile_grammar, read_tokenizer
from tidemill.workers.messages import Grammar, RequestError

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["ü", 1]}}}
WRITTEN = Grammar(
    kind="json_schema",
    text='{"type":"object","properties":{"b":{"type":"string"},"a":{"enum":["ü",1]}},'
    '"additionalProperties":false}',
)


@pytest.mark.parametrize("keyword", sorted(MEMBERS_MAX))
def test_members_of_a_keyword_are_limited_over_all_its_places(keyword: str) -> None:
    def schema(count: int) -> dict[str, Any]:
        if keyword in {"pattern", "multipleOf"}:
            value = "a" if keyword == "pattern" else 2
            return {"anyOf": [{keyword: value} for _ in range(count)]}
        if "roperties" in keyword:
            return {"items": {keyword: {f"k{at}": True for at in range(count)}}}
        return {"items": {keyword: [True] * count}, keyword: []}

    def checked(count: int) -> Grammar | None:
        return grammar_of({"type": "json_schema", "json_schema": {"schema": schema(count)}})

    assert checked(MEMBERS_MAX[keyword]) is not None
    with pytest.raises(RequestError, match=f"more than {MEMBERS_MAX[keyword]:,} members of {keyword}"):
        checked(MEMBERS_MAX[keyword] + 1)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "guided", "grammar"),
    [
        (None, None, None, None),
        ({"type": "text"}, {}, {"guided_json": None, "guided_choice": []}, None),
        ({"type": "json_object"}, None, None, Grammar(kind="json_object")),
        ({"type": "json_object", "schema": SCHEMA}, None, None, WRITTEN),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, None, None, WRITTEN),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}, None, None, WRITTEN),
        (None, {"json": SCHEMA}, None, WRITTEN),
        (None, {"json": json.dumps(SCHEMA)}, None, WRITTEN),
        (None, {"json_object": True, "regex": None}, None, Grammar(kind="json_object")),
        (None, {"regex": "a|b", "disable_fallback": True}, None, Grammar(kind="regex", text="a|b")),
        (None, {"grammar": 'start: "a"'}, None, Grammar(kind="lark", text='start: "a"')),
        (None, {"choice": ["ü", "b"]}, None, Grammar(kind="choice", text='["ü", "b"]')),
        (None, None, {"guided_json": SCHEMA}, WRITTEN),
        (None, None, {"json_schema": json.dumps(SCHEMA)}, WRITTEN),
        (None, None, {"ebnf": 'root ::= "a"'}, Grammar(kind="lark", text='root ::= "a"')),
        (None, {"json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)}, WRITTEN),
        ({"type": "json_object"}, {"json_object": True}, None, Grammar(kind="json_object")),
        (None, {"regex": "a"}, {"guided_regex": "a", "regex": "a"}, Grammar(kind="regex", text="a")),
        (None, None, {"guided_regex": "[0-9]+"}, Grammar(kind="regex", text="[0-9]+")),
        ({"type": "text"}, None, {"guided_choice": ["a"]}, Grammar(kind="choice", text='["a"]')),
    ],
)
def test_three_dialects(
    response_format: dict[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    guided: dict[str, Any] | None,
    grammar: Grammar | None,
) -> None:
    assert grammar_of(response_format, structured_outputs, guided) == grammar


LONG = "a" * (PATTERN_BYTES_MAX + 1)
MISTAKES: list[tuple[tuple[Any, Any, Any], str]] = [
    (({"type": "xml"}, None, None), "response_format.type"),
    (({}, None, None), "response_format.type"),
    (({"type": "json_schema"}, None, None), "response_format.json_schema"),
    (
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, None, None),
        "response_format.json_schema",
    ),
    ((None, {"structural_tag": {"a": 1}}, None), "structured_outputs.structural_tag"),
    ((None, {"json": SCHEMA, "regex": "a"}, None), "structured_outputs"),
    ((None, {"json": "{"}, None), "structured_outputs.json"),
    ((None, {"json": "[" * 60_000}, None), "structured_outputs.json"),
    ((None, {"json": "[]"}, None), "structured_outputs.json"),
    ((None, {"json": 7}, None), "structured_outputs.json"),
    ((None, {"json": {"const": float("nan")}}, None), "structured_outputs.json"),
    ((None, {"regex": "\ud800"}, None), "structured_outputs.regex"),
    ((None, {"regex": 7}, None), "structured_outputs.regex"),
    ((None, {"choice": ["a", 7]}, None), "structured_outputs.choice"),
    ((None, {"json_object": 7}, None), "structured_outputs.json_object"),
    ((None, None, {"guided_choice": ["a" * GRAMMAR_BYTES_MAX]}), "guided_choice"),
    ((None, None, {"guided_grammar": "a" * (LARK_BYTES_MAX + 1)}), "guided_grammar"),
    ((None, None, {"guided_regex": "a" * (PATTERN_BYTES_MAX + 1)}), "guided_regex"),
    ((None, None, {"guided_json": {"items": [{"pattern": LONG}]}}), "guided_json"),
    ((None, None, {"guided_json": {"items": {"patternProperties": {LONG: {}}}}}), "guided_json"),
    ((None, None, {"guided_regex": ""}), "guided_regex"),
    ((None, None, {"guided_json": nested(SCHEMA_DEPTH_MAX + 1)}), "guided_json"),
    ((None, None, {"guided_json": {"enum": [[]] * GRAMMAR_BYTES_MAX}}), "guided_json"),
    (({"type": "json_object"}, None, {"guided_regex": "a"}), "guided_regex"),
    ((None, {"regex": "a"}, {"guided_regex": "b"}), "guided_regex"),
    ((None, None, {"regex": 7}), "regex"),
]


@pytest.mark.parametrize(("asked", "param"), MISTAKES)
def test_meaningless_fields_are_named(asked: tuple[Any, Any, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        grammar_of(*asked)
    assert refused.value.param == param
    assert str(refused.value).startswith(param)


def test_limits_are_inclusive() -> None:
    assert grammar_of(None, {"regex": "a" * PATTERN_BYTES_MAX}) is not None
    assert grammar_of(None, {"grammar": "a" * LARK_BYTES_MAX}) is not None
    assert grammar_of(None, {"json": {"items": [{"pattern": "a" * PATTERN_BYTES_MAX}]}}) is not None
    assert grammar_of(None, {"json": {"properties": {"pattern": {"type": "string"}}}}) is not None
    assert grammar_of(None, {"json": nested(SCHEMA_DEPTH_MAX)}) is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FORM = st.sampled_from(["json", "regex", "choice", "grammar", "json_object", "type", "json_schema", "x"])


@given(
    st.none() | st.dictionaries(FORM, JSON, max_size=2),
    st.none() | st.dictionaries(FORM, JSON, max_size=2),
    st.dictionaries(st.sampled_from(sorted(FORM_OF)), JSON, max_size=2),
)
def test_anything_is_a_grammar_or_refused(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None, guided: dict[str, Any]
) -> None:
    try:
        grammar = grammar_of(response_format, structured_outputs, guided)
    except RequestError:
        return
    if grammar is not None:
        grammar.text.encode()
        assert (grammar.text == "") == (grammar.kind == "json_object")


def test_schema_of_too_many_objects_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", pytest.fail)
    with pytest.raises(RequestError, match="leave some out"):
        grammar_of(
            None, {"json": {"properties": {str(name): nested(1) for name in range(GRAMMAR_BYTES_MAX)}}}
        )


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
