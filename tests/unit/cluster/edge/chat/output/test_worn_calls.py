"""Calls as models write them when they err, by family: no text is lost, and no later call."""

import json
from contextlib import suppress
from dataclasses import replace
from sys import float_info
from time import thread_time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.workers.masks import allowed
from tests.unit.cluster.edge.chat.spoken import around, parsed, vocabulary, written
from tidemill.cluster.edge.chat.formats import (
    BEGIN,
    CALL,
    CALLED,
    DSML,
    FORMS,
    KIMI_END,
    QUOTE,
    SEP,
    THINKING,
    THOUGHT,
)
from tidemill.cluster.edge.chat.formats import END_OF_CALL as END
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.parts import Call, ReasoningText, Text
from tidemill.cluster.edge.chat.request.tool_grammar import forced
from tidemill.cluster.edge.chat.request.tools import Function, Tool
from tidemill.workers.messages import RequestError

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
LOOK = {
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
SCHEMAS = {"f": SCHEMA, "g": {}, "look": LOOK}
F, G = '{"name": "f", "arguments": {"note": "a"}}', '{"name": "g", "arguments": {}}'
FX, GX = "<function=f>\n<parameter=note>\na\n</parameter>\n</function>", "<function=g>\n</function>"
V3 = "function" + SEP + "f\n```json\n"
NOTE = {"note": "a"}
f: list[Any] = ["f", NOTE]
g: list[Any] = ["g", {}]

HERMES: list[tuple[str, list[Any]]] = [
    (f"{CALL}{F}{G}{CALLED}", [f, g]),
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
OPEN = f"{CALL}<function=f>\n<parameter=note>\na"
TWICE = FX.replace("</parameter>", "</parameter></parameter> </parameter><parameter=number>2</parameter>")
f2: list[Any] = ["f", {"note": "a", "number": 2}]
XML: list[tuple[str, list[Any]]] = [
    (f"{CALL}\n{FX}\n{GX}\n{CALLED} so", [f, g, "so"]),
    (f"{CALL}{GX}{FX}{CALLED}", [g, f]),
    (f"{CALL}{FX}{CALL}{GX}{CALLED}", [f, g]),
    (f"So {FX} so {GX}\n{CALLED}", ["So ", f, "so ", g]),
    (f"{CALL}<function=f><parameter=note>a</parameter><function=g></function>{CALLED}", [f, g]),
    (f"{OPEN}\n</function>\n{CALLED}", [f]),
    (f"{OPEN}\n<parameter=number>\n2\n</parameter>\n</function>{CALLED}", [f2]),
    (
        f"{OPEN} {CALLED} b\n</parameter>\n</function>\n{CALLED}{CALL}{GX}",
        [["f", {"note": f"a {CALLED} b"}], g],
    ),
    (f"{OPEN}\n{CALLED}{CALL}{GX}{CALLED}", [f, g]),
    (f"{CALL}<function=f><parameter=note>a</parameter> well{CALLED} so", [f, f"well{CALLED} so"]),
    ("a <function=f and b", ["a <function=f and b"]),
    (f"{CALL}{TWICE}", [f2]),
    (f"{OPEN}\n\n</function>", [["f", {"note": "a\n"}]]),
    *(
        (f"{CALL}<function=f><parameter=number>{text}</parameter></function>", [["f", {"number": value}]])
        for text, value in [("-1e999", -float_info.max), ("NaN", "NaN"), ("[Infinity]", "[Infinity]")]
    ),
    ("<function=f>\n<parameter=number>\n12}", [["f", '{"number": "12}']]),
    *(
        (written("qwen3_coder", {name: text}, "f"), [["f", {name: value}]])
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


TYPED: list[tuple[dict[str, str], Any]] = [
    ({"who": "Emma", "tags": "[]"}, {"who": "Emma", "tags": []}),
    ({"times": "3", "note": "3"}, {"times": 3, "note": "3"}),
    ({"times": "three"}, {"times": "three"}),
    ({"maybe": "True", "tags": ' ["a", "b"] '}, {"maybe": True, "tags": ["a", "b"]}),
    ({"maybe": "None", "note": "None"}, {"maybe": None, "note": "None"}),
    ({"note": "a <b> c\n\n</p> \u00e9"}, {"note": "a <b> c\n\n</p> \u00e9"}),
]
LOOKS: list[tuple[str, list[Any]]] = [
    *((written("qwen3_coder", texts), [["look", arguments]]) for texts, arguments in TYPED),
    (written("qwen3_coder", {"any": "7"}, "unknown"), [["unknown", {"any": "7"}]]),
    *(
        (f"{CALL}<function=look>{inside}{CALLED}", [["look", arguments]])
        for inside, arguments in [
            ("</function>", {}),
            ("\n", {}),
            ("<parameter=note>x</parameter>", {"note": "x"}),
            ("\n<parameter=note>x", {"note": "x"}),
            ("\n<parameter=times>3", {"times": 3}),
            ("\n<parameter=note>", {}),
        ]
    ),
    *(
        (f"{CALL}{body}{CALLED}", [f"{CALL}{body}{CALLED}"])
        for body in ("", "look", F, "<function=>\n</function>", "<function=look>\nwell</function>")
    ),
]


def worn(form: str) -> list[tuple[str, list[Any]]]:
    """Return the cases that each family with a tag around calls has."""
    begin, end, how = FORMS[form].begins[0], FORMS[form].ends, FORMS[form].written
    one, two = written(form, NOTE, "f"), written(form, {}, "g")
    cut = around(form, one).partition('a"' if FORMS[form].body == "json" else "a<")[0] + "a"
    whole = around(form, two, written(form, {"note": f"a {end or begin} b"}, "f"), two)
    return [
        (f"{around(form, one, two)} so", [f, g, "so"]),
        (f"So {around(form, two, one)}{around(form, one)}", ["So ", g, f, f]),
        (around(form, one)[: -len(FORMS[form].written.behind) or None] + around(form, two), [f, g]),
        (whole, [g, ["f", {"note": f"a {end or begin} b"}], g]),
        (f"{begin}oh{end} so", [f"{begin}oh{end} so"]),
        (
            f"{begin}oh{end}{around(form, one)}" if end else around(form, one),
            [f"{begin}oh{end}", f][not end :],
        ),
        (f"{how.before}{one.removesuffix(end)}{two.removeprefix(begin)}{how.behind}", [f, g]),
        (f"So {begin}", [f"So {begin}"]),
        (cut, [["f", '{"note": "a']]),
    ]


TAGGED = [
    form for form in FORMS if FORMS[form].begins and form not in ("granite", "llama3_json", "qwen3_coder")
]
KEYED: list[tuple[str, str, list[Any]]] = [
    (form, around(form, written(form, {name: text}, "f")), [["f", {name: value}]])
    for form in ("deepseek_v32", "minimax_m2", "glm45", "glm47", "gemma4")
    for names, text, value in [
        (("note", "maybe", "any", "ref", "fixed", "all", "mixed"), "123", "123"),
        (("note", "maybe", "any", "ref", "all"), "[1]", "[1]"),
        (("number",), "12", 12),
    ]
    for name in names
]
DSML_VALUE = '<{0}invoke name="f">\n<{0}parameter name="{1}" string="false">{2}</{0}parameter>\n</{0}invoke>'
GLM = "<tool_call>f<arg_key>note</arg_key><arg_value>a"
M2 = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="note">a'
KIMI = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
GEMMA = "<|tool_call>call:f{"
TODAY: list[tuple[str, str, list[Any]]] = [
    *((form, text, parts) for form in TAGGED for text, parts in worn(form)),
    *KEYED,
    *(
        ("deepseek_v32", DSML_VALUE.format(DSML, name, text), [["f", {name: value}]])
        for name, text, value in [
            ("free", "12", 12),
            ("any", "null", None),
            ("note", "12", "12"),
            ("one", '"a"', "a"),
            ("number", "many", "many"),
        ]
    ),
    ("glm47", f"{GLM}<arg_key>number</arg_key><arg_value>2</arg_value>{CALLED}", [f2]),
    ("glm47", f"{GLM}{CALLED}{CALL}g{CALLED}", [f, g]),
    ("glm47", f"{GLM}</arg_value> well{CALLED} so", [f, f"well{CALLED} so"]),
    (
        "glm47",
        f"{CALL}f\n<arg_key> note </arg_key>\n<arg_value> a\n</arg_value>{CALLED}",
        [["f", {"note": " a\n"}]],
    ),
    ("minimax_m2", f'{M2}\n<parameter name="number">2</parameter></invoke>', [f2]),
    ("minimax_m2", f"{M2}\n</invoke>\n<invoke name='g'></invoke></minimax:tool_call> so", [f, g, "so"]),
    ("minimax_m2", "So <invoke name=g>\n</invoke> so", ["So ", g, "so"]),
    ("minimax_m2", "a <invoke name= and b", ["a <invoke name= and b"]),
    ("kimi_k2", f'{KIMI}null{KIMI_END}{KIMI} {{"note": "a"}}', [["f", {}], f]),
    ("kimi_k2", f"{KIMI.replace('functions.f:3', 'f')}{KIMI_END}", [["f", {}]]),
    ("mistral", f"[TOOL_CALLS][{F}, {G}] so", [f, g, "so"]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"note": "a"}[TOOL_CALLS]g{}', [f, g]),
    ("mistral", "[TOOL_CALLS]f[ARGS]", [["f", {}]]),
    (
        "gemma4",
        f"{GEMMA}number:1.5,note:{QUOTE}a{QUOTE}}}call:g{{}}",
        [["f", {"number": 1.5, "note": "a"}], g],
    ),
    (
        "gemma4",
        f"{GEMMA}free:{{a:[{QUOTE}b, c:]{QUOTE},1,{{}}],d:true,e:None}},note:{QUOTE}}}{QUOTE}}}<tool_call|>",
        [["f", {"free": {"a": ["b, c:]", 1, {}], "d": True, "e": None}, "note": "}"}]],
    ),
    (
        "gemma4",
        f"{GEMMA}note:12,maybe:null,free: x ,one:7<tool_call|>",
        [["f", {"note": "12", "maybe": None, "free": "x", "one": 7}]],
    ),
    ("gemma4", f"{GEMMA}note:{QUOTE}a<tool_call|> so{GEMMA}}}<tool_call|>", [f, "so", ["f", {}]]),
    ("gemma4", f"{GEMMA}note:{QUOTE}a{QUOTE} well}}<tool_call|>", [f, "well}<tool_call|>"]),
    ("gemma4", "<|tool_call>call:g<tool_call|>", [g]),
]
V3_CALL = f'{BEGIN}{V3}{{"note": "a"}}\n```{END}'
V31_CALL = f'{BEGIN}f{SEP}{{"note": "a"}}{END}'
CASES: list[tuple[str, str, list[Any]]] = [
    *(("hermes", text, parts) for text, parts in HERMES),
    *(("qwen3_coder", text, parts) for text, parts in (*XML, *LOOKS)),
    ("deepseek_v3", V3_CALL.replace(f"\n```{END}", V3_CALL), [f, f]),
    ("deepseek_v31", V31_CALL.replace(END, V31_CALL), [f, f]),
    ("granite", f"<|tool_call|>[{F}, {G}] so", [f, g, "so"]),
    ("granite", f"<|tool_call|>{F}<|tool_call|>{G}", [f, g]),
    ("llama3_json", f"{F}; {G} so".replace("arguments", "parameters"), [f, g, "so"]),
    ("llama3_json", '{"name": "f", "parameters": null}', [["f", {}]]),
    ("pythonic", "[f(note='a'), g()] so", [f, g, "so"]),
    ("deepseek_v31", f"{BEGIN}g{SEP}null{END}{V31_CALL}", [g, f]),
    *TODAY,
    ("pythonic", "[f(note='])')]", [["f", {"note": "])"}]]),
    ("pythonic", r'[f(note="\ud83d\ude00\/\\/")]', [["f", {"note": "\U0001f600/\\/"}]]),
    ("pythonic", "[f(number=-1e999)]", [["f", {"number": -float_info.max}]]),
    ("pythonic", r'[f(note="\ud83d.")]', [["f", {"note": "\ufffd."}]]),
]


OF_XML = OutputFormat(form=FORMS["qwen3_coder"], schemas=SCHEMAS)


def parts_of(manner: OutputFormat, *pieces: str) -> list[Any]:
    """The parts as plain data; arguments as JSON if they are."""
    found: list[Any] = []
    for part in parsed(manner, *pieces):
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


@pytest.mark.parametrize("form", sorted({form for form, _, _ in TODAY}))
def test_call_inside_an_unclosed_thought_of_each_family(form: str) -> None:
    manner = OutputFormat(form=FORMS[form], reasoning=THINKING["qwen3"], thinking=True, schemas=SCHEMAS)
    text = f"Hm. {around(form, written(form, NOTE, 'f'), written(form, NOTE, 'h'))} Hm.{THOUGHT}Yes."
    for pieces in ([text], list(text)):
        thought, made, more, words = parsed(manner, *pieces)
        assert (thought, words) == (ReasoningText("Hm. "), Text("Yes."))
        assert isinstance(made, Call)
        assert (made.name, json.loads(made.arguments)) == ("f", {"note": "a"})
        assert isinstance(more, ReasoningText)
        assert "h" in more.text


@pytest.mark.parametrize(
    ("form", "begun"),
    [
        ("glm47", f"{CALL}f<arg_key>"),
        ("glm47", f"{CALL}f<arg_key>note</arg_key><arg_value>a</arg_value><arg_key>"),
        ("minimax_m2", "<invoke name="),
        ("minimax_m2", '<invoke name="f"><parameter name='),
        ("gemma4", "<|tool_call>call:f{"),
        ("mistral", "[TOOL_CALLS]"),
        ("hermes", CALL),
    ],
)
def test_white_space_in_a_call_takes_little_time(form: str, begun: str) -> None:
    parser = open_parser(OutputFormat(form=FORMS[form], schemas=SCHEMAS))
    parser.push(begun, last=False)
    began_s = thread_time()
    parser.push(" " * 10_000, last=False)
    parser.push(" ", last=False)
    assert thread_time() - began_s < 0.1


def test_end_tags_that_repeat_take_little_time() -> None:
    parser = open_parser(OF_XML)
    parser.push("<function=f><parameter=note>a", last=False)
    began_s = thread_time()
    for _ in range(10_000):
        parser.push("</parameter>", last=False)
    assert thread_time() - began_s < 4.0


def test_call_that_is_cut_short_is_no_json() -> None:
    whole = written("qwen3_coder", {"who": "Emma", "note": "to do"})
    text = whole.partition("\n</parameter>\n</function>")[0]
    assert parts_of(OF_XML, text) == [["look", '{"who": "Emma", "note": "to do']]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(min_size=1, max_size=5))
def test_no_text_breaks_a_call_and_its_arguments_are_the_text(text: str, name: str) -> None:
    called = written("qwen3_coder", {"note": text}, name)
    for whole in (f"{CALL}{text}{CALLED}", called, f"{CALL}<function={name}><parameter={text}>{CALLED}"):
        assume(whole.count(CALLED) == 1)
        for part in parsed(OF_XML, *whole):
            assert not isinstance(part, Call) or isinstance(json.loads(part.arguments), dict)
    if "</parameter>" not in text and CALLED not in text:
        assert parts_of(OF_XML, *written("qwen3_coder", {"note": text})) == [["look", {"note": text}]]


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
    manner = replace(OF_XML, schemas={"f": schema})
    grammar = forced([Tool(type="function", function=Function(name="f", parameters=schema))], manner, {})
    with suppress(RequestError):
        assert allowed(vocabulary().grammars.matcher(grammar)).any()
        made = parsed(manner, *written("qwen3_coder", {"a": "1", "b": "x", "c": "2"}, "f"))
        assert any(isinstance(part, Call) for part in made)


def items(form: str) -> list[tuple[str, int]]:
    """Return texts with the numbers of calls of `f` in them."""
    begin, end = FORMS[form].begins[0], FORMS[form].ends
    one = written(form, NOTE, "f")
    whole = around(form, one)
    parts = [(whole, 1), (around(form, one, one), 2), (f"{begin}oh{end}" if end else "", 0), (" well ", 0)]
    return [*parts, (whole.removesuffix(FORMS[form].written.behind).removesuffix(end), 1)]


@given(st.data())
def test_no_words_and_no_call_are_lost(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["hermes", "qwen3_coder", "deepseek_v31", *(row[0] for row in TODAY)]))
    drawn = data.draw(st.lists(st.sampled_from(items(form)), max_size=7))
    text = "".join(text for text, _ in drawn)
    parts = parts_of(OutputFormat(form=FORMS[form], schemas=SCHEMAS), *text)
    shown = "".join(part for part in parts if isinstance(part, str))
    assert sum(isinstance(part, list) for part in parts) == sum(calls for _, calls in drawn)
    assert (shown.count("well"), shown.count("oh")) == (text.count("well"), text.count("oh"))
