"""Calls as models write them when they err, by family: no text is lost, and no later call."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.edge.chat.output.test_output_parser import joined, parsed
from tidemill.cluster.edge.chat.formats import BEGIN, CALL, CALLED, FORMS, SEP, THINKING
from tidemill.cluster.edge.chat.formats import END_OF_CALL as END
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.parts import Call, ReasoningText, Text

SCHEMA: dict[str, Any] = {
    "properties": {
        "note": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "ref": {"$ref": "#/$defs/text"},
        "fixed": {"const": "1"},
        "one": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "all": {"allOf": [{"$ref": "#/$defs/text"}]},
        "mixed": {"enum": ["1", None]},
        "number": {"type": "number"},
        "loop": {"$ref": "#/$defs/loop"},
    },
    "$defs": {"text": {"type": ["null", "string"]}, "loop": {"$ref": "#/$defs/loop"}},
}
SCHEMAS = {"f": SCHEMA, "g": {}}
F, G = '{"name": "f", "arguments": {"note": "a"}}', '{"name": "g", "arguments": {}}'
FX, GX = "<function=f>\n<parameter=note>\na\n</parameter>\n</function>", "<function=g>\n</function>"
V3 = "function" + SEP + "f\n```json\n"
f: list[Any] = ["f", {"note": "a"}]
g: list[Any] = ["g", {}]

HERMES: list[tuple[str, list[Any]]] = [
    (f"{CALL}{F}{G}{CALLED}", [f, g]),
    (f"{CALL}\n{F}\n{G}\n{CALLED}", [f, g]),
    (f"{CALL}[{F}, {G}]{CALLED}", [f, g]),
    (f"{CALL}{F}{CALL}{G}{CALLED} so", [f, g, "so"]),
    (f"{CALL}{F} well{CALLED} so", [f, f"well{CALLED} so"]),
    (f"{CALL}{F}}}{CALLED} so", [f, "so"]),
    (f'{CALL}{{"name": "f", "arguments": {{"note": "a"}}{CALL}{G}{CALLED}', [f, g]),
    (f'{CALL}{{"name": "f", "arguments": null}}{CALLED}', [["f", {}]]),
    (f'{CALL}{{"name": "f", "arguments": "{{\\"note\\": \\"a\\"}}"}}{CALLED}', [f]),
    (f'{CALL}{{"name": "f", "arguments": {{"note": "a{CALLED}"}}}}{CALLED}', [["f", {"note": f"a{CALLED}"}]]),
    (f'{CALL}{{"arguments": {{"note": "{CALLED}"}}, "name": "f"}}{CALLED}', [["f", {"note": CALLED}]]),
    (
        f'{CALL}{{"name": "f", "arguments": {{"note": "{CALLED} {CALL} {{"}}}}{CALLED}{CALL}{G}{CALLED}',
        [["f", {"note": f"{CALLED} {CALL} {{"}], g],
    ),
    (
        f'{CALL}{{"name": "f", "arguments": {{"note": "a}}}}{CALLED} so {CALL}{G}{CALLED}',
        [["f", '{"note": "a}}'], "so ", g],
    ),
    (f"{CALL}{{oh{CALLED}{CALL}{G}{CALLED}", [f"{CALL}{{oh{CALLED}", g]),
    (f'{CALL}"oh{CALLED}{CALL}{G}{CALLED}', [f'{CALL}"oh{CALLED}', g]),
]
XML: list[tuple[str, list[Any]]] = [
    (f"{CALL}\n{FX}\n{GX}\n{CALLED} so", [f, g, "so"]),
    (f"{CALL}{GX}{FX}{CALLED}", [g, f]),
    (f"{CALL}{FX}{CALL}{GX}{CALLED}", [f, g]),
    (f"So {FX} so {GX}\n{CALLED}", ["So ", f, "so ", g]),
    (f"{CALL}<function=f><parameter=note>a</parameter><function=g></function>{CALLED}", [f, g]),
    (f"{CALL}<function=f>\n<parameter=note>\na\n</function>\n{CALLED}", [f]),
    (
        f"{CALL}<function=f>\n<parameter=note>\na\n<parameter=number>\n2\n</parameter>\n</function>{CALLED}",
        [["f", {"note": "a", "number": 2}]],
    ),
    (
        f"{CALL}<function=f>\n<parameter=note>\na {CALLED} b\n</parameter>\n</function>\n{CALLED}{CALL}{GX}",
        [["f", {"note": f"a {CALLED} b"}], g],
    ),
    (f"{CALL}<function=f>\n<parameter=note>\na\n{CALLED}{CALL}{GX}{CALLED}", [f, g]),
    (f"{CALL}<function=f><parameter=note>a</parameter> well{CALLED} so", [f, f"well{CALLED} so"]),
    ("a <function=f and b", ["a <function=f and b"]),
    ("<function=f>\n<parameter=number>\n12}", [["f", '{"number": "12}']]),
    *(
        (
            f"{CALL}<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n{CALLED}",
            [["f", {name: value}]],
        )
        for names, text, value in [
            (("note", "maybe", "any", "ref", "fixed", "all", "mixed"), "123", "123"),
            (("note", "maybe", "any", "ref", "fixed", "all", "mixed"), "true", "true"),
            (("note", "maybe", "any", "ref", "all"), "1e5", "1e5"),
            (("note", "maybe", "any", "ref", "all"), "[1]", "[1]"),
            (("maybe", "any", "ref", "all", "mixed"), "null", None),
            (("number", "one", "loop"), "123", 123),
            (("one",), "1.5", "1.5"),
        ]
        for name in names
    ),
]
V3_CALL = f'{BEGIN}{V3}{{"note": "a"}}\n```{END}'
V31_CALL = f'{BEGIN}f{SEP}{{"note": "a"}}{END}'
CASES: list[tuple[str, str, list[Any]]] = [
    *(("hermes", text, parts) for text, parts in HERMES),
    *(("qwen3_coder", text, parts) for text, parts in XML),
    ("deepseek_v3", f"{V3_CALL}{V3_CALL} so", [f, f, "so"]),
    ("deepseek_v3", V3_CALL.replace('"a"', f'"a{END}"'), [["f", {"note": f"a{END}"}]]),
    ("deepseek_v3", V3_CALL.replace(f"\n```{END}", V3_CALL), [f, f]),
    ("deepseek_v31", f"{V31_CALL}{V31_CALL} so", [f, f, "so"]),
    ("deepseek_v31", V31_CALL.replace('"a"', f'"a{END}"'), [["f", {"note": f"a{END}"}]]),
    ("deepseek_v31", V31_CALL.replace(END, V31_CALL), [f, f]),
    ("granite", f"<|tool_call|>[{F}, {G}] so", [f, g, "so"]),
    ("granite", f"<|tool_call|>{F}<|tool_call|>{G}", [f, g]),
    ("llama3_json", f"{F}; {G} so".replace("arguments", "parameters"), [f, g, "so"]),
    ("llama3_json", '{"name": "f", "parameters": null}', [["f", {}]]),
    ("pythonic", "[f(note='a'), g()] so", [f, g, "so"]),
    ("pythonic", "[f(note='])')]", [["f", {"note": "])"}]]),
]


def parts_of(manner: OutputFormat, *pieces: str) -> list[Any]:
    """The parts as plain data; arguments as JSON if they are."""
    found: list[Any] = []
    for part in joined(parsed(manner, *pieces)):
        if isinstance(part, Call):
            try:
                arguments = json.loads(part.arguments)
            except ValueError:
                arguments = part.arguments
            found.append([part.name, arguments])
        else:
            found.append(part.text)
    return found


@pytest.mark.parametrize(("form", "text", "parts"), CASES)
def test_worn_calls_are_read_however_their_text_is_cut(form: str, text: str, parts: list[Any]) -> None:
    manner = OutputFormat(form=FORMS[form], schemas=SCHEMAS)
    assert parts_of(manner, text) == parts
    assert parts_of(manner, *text) == parts
    for cut in range(1, len(text)):
        assert parts_of(manner, text[:cut], text[cut:]) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"Hm. {CALL}{F}{CALLED}", [ReasoningText("Hm. "), Call(0, "f", '{"note": "a"}')]),
        (
            f"Hm. {CALL}{F}{CALLED} So.</think>Yes.",
            [ReasoningText("Hm. "), Call(0, "f", '{"note": "a"}'), ReasoningText("So."), Text("Yes.")],
        ),
        (
            f'I may write {CALL}{{"name": "h", "arguments": {{}}}}{CALLED} here.</think>Yes.',
            [
                ReasoningText(f'I may write {CALL}{{"name": "h", "arguments": {{}}}}{CALLED} here.'),
                Text("Yes."),
            ],
        ),
        (f"{CALL} is a tag.</think>Yes.", [ReasoningText(f"{CALL} is a tag."), Text("Yes.")]),
    ],
)
def test_call_of_a_known_function_inside_a_thought(text: str, parts: list[Any]) -> None:
    manner = OutputFormat(form=FORMS["hermes"], reasoning=THINKING["qwen3"], thinking=True, schemas=SCHEMAS)
    assert parsed(manner, text) == parts
    assert parsed(manner, *text) == parts


ITEMS = {
    "hermes": [f"{CALL}{F}{CALLED}", f"{CALL}{F}", f"{CALL}{F}{G}{CALLED}", f"{CALL}{{oh{CALLED}"],
    "qwen3_coder": [f"{CALL}{FX}{CALLED}", FX, f"{CALL}{FX}{GX}{CALLED}", f"{CALL}oh{CALLED}", f"{CALL}{FX}"],
    "deepseek_v31": [V31_CALL, V31_CALL.removesuffix(END), f"{BEGIN}oh{END}"],
}


@given(st.data())
def test_no_words_and_no_call_are_lost(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(ITEMS)))
    items = data.draw(st.lists(st.sampled_from([*ITEMS[form], " well "]), max_size=7))
    text = "".join(items)
    parts = parts_of(OutputFormat(form=FORMS[form], schemas=SCHEMAS), *text)
    called: list[str] = [part[0] for part in parts if isinstance(part, list)]
    shown = "".join(part for part in parts if isinstance(part, str))
    assert called.count("f") == text.count('"a"') + text.count("=f>")
    assert (shown.count("well"), shown.count("oh")) == (text.count("well"), text.count("oh"))
