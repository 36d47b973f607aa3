"""Constraints of an answer, in the forms that clients use, as a Grammar. Pure.

response_format      OpenAI: text, json_object, or json_schema with {"schema": ...}
structured_outputs   vLLM: one of json, regex, choice, grammar (Lark or EBNF), json_object
guided_json etc.     older names of vLLM
regex, ebnf, json_schema    SGLang
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from tidemill.cluster.edge.chat.request.schema import enforced
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError

SCHEMA_DEPTH_MAX = 64
"""The most nested objects and lists of a JSON schema."""

PATTERN_BYTES_MAX = 4 << 10
LARK_BYTES_MAX = 8 << 10
"""The time of a regex can grow with the square of its length and delays every row of a step: 20 ms at this
size."""

MEMBERS_MAX = {
    "properties": 1_000,
    "patternProperties": 50,
    "anyOf": 250,
    "oneOf": 250,
    "allOf": 100,
    "prefixItems": 250,
    "pattern": 100,
    "multipleOf": 16,
}
"""The most members of a keyword in a schema, all its places together."""

BYTES_PER_CONTAINER = 2
"""An object or list in a schema is written in at least as many bytes."""

FORMS = ("json", "regex", "choice", "grammar", "json_object")
FORM_OF = {
    **{f"guided_{form}": form for form in FORMS[:4]},
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
"""The fields with one form each: older ones of vLLM, and SGLang's."""

HARMLESS = ("disable_fallback", "backend")


class Asked(NamedTuple):
    """A constraint, and the keywords of its schema that it does not enforce."""

    grammar: Grammar
    left_out: tuple[str, ...] = ()


def grammar_of(
    response_format: Mapping[str, object] | None,
    structured_outputs: Mapping[str, object] | None = None,
    others: Mapping[str, object] | None = None,
) -> Grammar | None:
    """Return the grammar of `asked_of`. Raises RequestError."""
    asked = asked_of(response_format, structured_outputs, others)
    return None if asked is None else asked.grammar


def asked_of(
    response_format: Mapping[str, object] | None,
    structured_outputs: Mapping[str, object] | None = None,
    others: Mapping[str, object] | None = None,
) -> Asked | None:
    """Return the one constraint; `others` are fields of FORM_OF. Raises RequestError."""
    requested: dict[str, Asked | None] = {}
    if response_format is not None:
        requested["response_format"] = _of_response_format(response_format)
    if structured_outputs is not None:
        requested["structured_outputs"] = _of_structured_outputs(structured_outputs)
    for field, value in (others or {}).items():
        if value not in (None, []):
            requested[field] = _of_form(FORM_OF[field], value, field)
    found = {field: asked for field, asked in requested.items() if asked is not None}
    if len({asked.grammar for asked in found.values()}) > 1:
        first, second, *_ = found
        raise RequestError(f"{second}: {first} also restricts the answer: give one", param=second)
    return next(iter(found.values()), None)


def _of_response_format(value: Mapping[str, Any]) -> Asked | None:
    param = "response_format"
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict()} if value["schema"]:
            return _schema(cast("dict[str, object]", value["schema"]), f"{param}.schema")
        case {"type": "json_object"}:
            return Asked(Grammar(kind="json_object"))
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            named = cast("dict[str, Any]", value["json_schema"])
            return _schema(named["schema"], f"{param}.json_schema.schema", strict=named.get("strict") is True)
        case {"type": "json_schema"}:
            raise RequestError(
                f'{param}.json_schema: give {{"name": ..., "schema": {{...}}}}', param=f"{param}.json_schema"
            )
        case _:
            raise RequestError(f"{param}.type: use text, json_object or json_schema", param=f"{param}.type")


def _of_structured_outputs(value: Mapping[str, object]) -> Asked | None:
    param = "structured_outputs"
    given = {
        name: constraint
        for name, constraint in value.items()
        if constraint not in (None, False, []) and name not in HARMLESS
    }
    unknown = next((name for name in given if name not in FORMS), None)
    if unknown is not None:
        raise RequestError(
            f"{param}.{unknown[:64]} is not supported: use one of {', '.join(FORMS)}",
            param=f"{param}.{unknown[:64]}",
        )
    if len(given) > 1:
        raise RequestError(f"{param}: {' and '.join(given)} exclude each other: give one", param=param)
    return next((_of_form(form, constraint, f"{param}.{form}") for form, constraint in given.items()), None)


def _of_form(form: str, value: object, param: str) -> Asked:
    match form, value:
        case "json", dict():
            return _schema(cast("dict[str, object]", value), param)
        case "json", str(text):
            return _schema(_parsed(text, param), param)
        case "regex", str(text) if text:
            return Asked(Grammar(kind="regex", text=_bounded(text, param, PATTERN_BYTES_MAX)))
        case "grammar", str(text) if text:
            return Asked(Grammar(kind="lark", text=_bounded(text, param, LARK_BYTES_MAX)))
        case "choice", list() if all(isinstance(choice, str) for choice in cast("list[object]", value)):
            return Asked(Grammar(kind="choice", text=_bounded(json.dumps(value, ensure_ascii=False), param)))
        case "json_object", True:
            return Asked(Grammar(kind="json_object"))
        case _:
            wanted = {
                "json": "a JSON schema, as an object or as its text",
                "choice": "a list of texts",
                "json_object": "true",
            }.get(form, "a text that is not empty")
            raise RequestError(f"{param}: give {wanted}", param=param)


def _parsed(text: str, param: str) -> dict[str, object]:
    try:
        schema: object = json.loads(_bounded(text, param))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not the text of a JSON schema: {error}", param=param) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{param}: give a JSON schema that is an object", param=param)
    return cast("dict[str, object]", schema)


def _schema(schema: dict[str, object], param: str, *, strict: bool = False) -> Asked:
    check_schema(schema, param)
    kept, left_out = enforced(schema, param, strict=strict)
    try:
        text = json.dumps(kept, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError) as error:
        raise RequestError(f"{param} cannot be written as JSON: {error}", param=param) from error
    return Asked(Grammar(kind="json_schema", text=_bounded(text, param)), left_out)


def check_schema(schema: dict[str, object], param: str) -> None:
    """Check a schema's depth, its numbers of members, and the length of its patterns. Raises RequestError."""
    level: list[object] = [schema]
    members = Counter[str]()
    depth = found = 0
    while level:
        depth += 1
        found += len(level)
        if found * BYTES_PER_CONTAINER > GRAMMAR_BYTES_MAX:  # before it is written to be measured
            raise RequestError(
                f"{param} has {found:,} objects and lists or more: leave some out", param=param
            )
        if depth > SCHEMA_DEPTH_MAX:
            raise RequestError(
                f"{param} is nested more than {SCHEMA_DEPTH_MAX} levels deep: use $defs and $ref", param=param
            )
        for keyword, count in _members(level):
            members[keyword] += count
            if members[keyword] > MEMBERS_MAX[keyword]:
                raise RequestError(
                    f"{param} has more than {MEMBERS_MAX[keyword]:,} members of {keyword}, "
                    "in all its places: leave some out",
                    param=param,
                )
        for pattern in _patterns(level):
            _bounded(pattern, f"{param}: a pattern", PATTERN_BYTES_MAX)
        level = [child for schema in level for child in _children(schema)]


def _members(level: Sequence[object]) -> Iterator[tuple[str, int]]:
    for schema in level:
        if isinstance(schema, dict):
            schema = cast("dict[str, object]", schema)
            for keyword in MEMBERS_MAX.keys() & schema.keys():
                value = schema[keyword]
                yield keyword, len(cast("list[object]", value)) if isinstance(value, (dict, list)) else 1


def _patterns(level: Sequence[object]) -> Iterator[str]:
    for schema in level:
        if isinstance(schema, dict):
            schema = cast("dict[str, object]", schema)
            pattern, properties = schema.get("pattern"), schema.get("patternProperties")
            if isinstance(pattern, str):
                yield pattern
            if isinstance(properties, dict):
                yield from cast("dict[str, object]", properties)


def _children(value: object) -> list[object]:
    """Return the objects and lists in an object or a list."""
    items: list[object] = []
    if isinstance(value, dict):
        items = list(cast("dict[object, object]", value).values())
    elif isinstance(value, list):
        items = cast("list[object]", value)
    return [item for item in items if isinstance(item, (dict, list))]


def _bounded(text: str, param: str, bytes_max: int = GRAMMAR_BYTES_MAX) -> str:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            f"{param} holds half of a surrogate pair: send valid Unicode", param=param
        ) from None
    if num_bytes > bytes_max:
        raise RequestError(
            f"{param} has {num_bytes:,} bytes: shorten it to {bytes_max:,} or less",
            param=param.partition(":")[0],
        )
    return text
