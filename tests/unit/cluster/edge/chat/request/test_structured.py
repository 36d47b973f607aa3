"""Three dialects of clients become one Grammar; a meaningless field is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cluster.edge.chat.request.structured import (
    FORM_OF,
    GRAMMAR_BYTES_MAX,
    LARK_BYTES_MAX,
    MEMBERS_MAX,
    PATTERN_BYTES_MAX,
    SCHEMA_DEPTH_MAX,
    grammar_of,
)
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
