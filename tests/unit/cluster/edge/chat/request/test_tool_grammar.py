"""A constrained answer: a thought, then what the constraint allows or calls, or a forced call, in the syntax
of each family. The grammar takes it whole, and the parsers understand it however it is cut."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.unit.cluster.edge.chat.spoken import around, check_spoken, plain, spoken, vocabulary, written
from tidemill.cluster.edge.chat.formats import CHANNEL, END, FINAL, FORMS, MESSAGE, START, THINKING, THOUGHT
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.request.answer_grammar import behind_thought, words_or_calls
from tidemill.cluster.edge.chat.request.tool_grammar import forced
from tidemill.cluster.edge.chat.request.tools import Function, Tool
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar

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


A_NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CONSTRAINTS: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "json_schema": (
        Grammar(kind="json_schema", text=json.dumps(A_NUMBER | {"additionalProperties": False})),
        ['{"a": 1}', '{\n  "a": 1}'],
        ['{"b": 1}', "a"],
    ),
    "json_object": (
        Grammar(kind="json_object"),
        ['{"name": "look"}', '{"name": "leave", "parameters": {}}', '{"name": "look", "parameters": 1}'],
        ["[1]", "a"],
    ),
    "array": (
        Grammar(kind="json_schema", text='{"type": "array"}'),
        ['[true, "f(", [1]]', "[]"],
        ["{}", "a"],
    ),
    "regex": (
        Grammar(kind="regex", text=r"(?s)[\[{<]?[^!]{0,400}\.?"),
        ["no.", "{a: 1}", "<tool", "[a"],
        ["!"],
    ),
    "choice": (Grammar(kind="choice", text='["yes", "{", "<"]'), ["yes", "{", "<"], ["no", "[", "ye"]),
    "lark": (
        Grammar(kind="lark", text='start: ("{" | "[" | "<") /"[a-z]+"/? ":"? /[0-9]/ ("}" | "]")?'),
        ['{"name":1}', "[2]", "<3"],
        ["3", "<t"],
    ),
    "ebnf": (Grammar(kind="lark", text='root ::= "{" [0-9]+ "}"'), ["{12}"], ["{a}", "{"]),
}
THINKS = "Hm, <tool_call> or { or [?\n"
THOUGHTS = {
    "none": [""],
    "open": ["{thought}</think>\n\n", "</think>"],
    "free": ["", "<think>{thought}</think>\n\n"],
}
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}{{thought}}{END}{START}assistant"
IN_CHANNELS = {
    "none": [""],
    "open": ["{thought}" + ANALYSIS.partition("{thought}")[2]],
    "free": ["", ANALYSIS, ANALYSIS * 2],
}


def format_of(form: str, reasoning: str, *, forced: bool = False) -> OutputFormat:
    channels = form == "openai"
    how = THINKING["openai_gptoss" if channels else "qwen3"]
    return OutputFormat(
        form=FORMS[form],
        schemas=SCHEMAS,
        channels=channels,
        constrained=True,
        forced=forced,
        reasoning=None if reasoning == "none" else how,
        thinking=reasoning == "open" and not channels,
        begun=ANALYSIS.partition("{thought}")[0] if channels and reasoning == "open" else "",
    )


def thoughts(form: str, reasoning: str, thought: str = THINKS) -> list[tuple[str, str]]:
    """Return the texts before an answer, with their reasoning."""
    texts = (IN_CHANNELS if form == "openai" else THOUGHTS)[reasoning]
    return [(text.replace("{thought}", thought), thought * text.count("{thought}")) for text in texts]


COMBINED = [(*names, number % 2 == 1) for number, names in enumerate(product(FORMS, CONSTRAINTS, THOUGHTS))]
"""Tags are tokens in every other case: neighbours differ in form, constraint or reasoning."""


@pytest.mark.parametrize(("form", "constraint", "reasoning", "as_tokens"), COMBINED)
def test_answer_matches_or_calls_behind_a_thought(
    form: str, constraint: str, reasoning: str, *, as_tokens: bool
) -> None:
    words, good, bad = CONSTRAINTS[constraint]
    manner = format_of(form, reasoning)
    known = vocabulary(*(*manner.tags, *THINKING["qwen3"].tags) if as_tokens else ())
    takes = partial(known.takes, words_or_calls(words, TOOLS, manner, known.added))

    final = FINAL if manner.channels else ""
    one, called = around(form, written(form, ONCE)), [("look", plain(ONCE))]
    calls = [(one, called), (around(form, written(form, {}, "wait")), [("wait", "{}")])]
    if FORMS[form].written.between is not None:
        calls.append((around(form, *[written(form, TWICE)] * 2), [("look", plain(TWICE))] * 2))
    before = thoughts(form, reasoning, "Hm, { or [?\n" if as_tokens else THINKS)
    for thought, reasoned in before:
        breaks = constraint == "regex" and thought.endswith("</think>")
        for text in good:
            assert takes(thought + final + text) is not breaks, text
            check_spoken(manner, thought + final + text, (reasoned, text, []))
        for text, found in calls:
            assert takes(thought + text), text
            if constraint == "json_schema":  # the parser does not know it
                check_spoken(manner, thought + text, (reasoned, "", found))
        wrong = [
            around(form, written(form, {"who": "Bob", "tags": []})),
            around(form, written(form, {}, "leave")),
        ]
        free = constraint == "regex" or (constraint == "json_object" and form == "llama3_json")
        for text in (*(final + text for text in bad), *([] if free else wrong), one + "!", thought * 2 + "!"):
            assert not takes(thought + text), text
    if reasoning == "open":
        assert not takes(final + good[0])


@pytest.mark.parametrize("reasoning", THOUGHTS)
@pytest.mark.parametrize("form", FORMS)
def test_forced_call_behind_a_thought(form: str, reasoning: str) -> None:
    manner = format_of(form, reasoning, forced=True)
    known = vocabulary()
    grammar = behind_thought(forced(TOOLS, manner, known.added), manner, known.added)
    one = around(form, written(form, ONCE))
    for thought, reasoned in thoughts(form, reasoning, "Hm." if manner.channels else f"I may write {one}. "):
        text = thought + one
        assert known.takes(grammar, text)
        check_spoken(manner, text, (reasoned, "", [("look", plain(ONCE))]))


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("form", sorted(form for form in FORMS if FORMS[form].parameters is not None))
def test_arguments_have_the_marks_of_calls(form: str, *, as_tokens: bool) -> None:
    """A grammar has the end of each argument, so no other mark ends one."""
    marks = FORMS[form].parameters
    assert marks is not None
    known = vocabulary(*FORMS[form].tags if as_tokens else ())
    begins = [marks.before.format(name="n", is_text="true"), marks.closes, *FORMS[form].begins]
    line = " " if form == "gemma4" else "\n"
    split = [begin for begin in begins if not any(tag in begin for tag in known.added)]
    note = "".join(f"{begin} {line}{begin}" for begin in split)
    inside = note if form == "gemma4" else note + marks.ends[0] + '\\"'
    call = {"note": f"a{note}{line}{line}b", "tags": ["a" if as_tokens or not inside.isascii() else inside]}
    schema = {
        "type": "object",
        "properties": {"note": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    }
    manner = replace(format_of(form, "none"), schemas={"look": schema})
    tools = [Tool(type="function", function=Function(name="look", parameters=schema))]
    grammar = words_or_calls(Grammar(kind="json_object"), tools, manner, known.added)
    text = around(form, *[written(form, call)] * 2)
    assert known.takes(grammar, text)
    check_spoken(manner, text, ("", "", [("look", plain(call))] * 2))


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"type": "object"}, "{a:1}", "1"),
        ({"type": "array"}, "[1]", "{}"),
        ({"type": ["string", "null"]}, "null", "1"),
    ],
)
def test_value_of_gemma_has_a_type_of_its_schema(wanted: dict[str, Any], good: str, bad: str) -> None:
    schema = {"properties": {"-A": wanted}, "required": ["-A"]}
    tools = [Tool(type="function", function=Function(name="look", parameters=schema))]
    grammar = forced(tools, format_of("gemma4", "none"), {})
    for value, is_good in ((good, True), (bad, False)):
        text = around("gemma4", f"<|tool_call>call:look{{-A:{value}}}<tool_call|>")
        assert vocabulary().takes(grammar, text) is is_good


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"openai"}))
def test_only_a_call_of_an_offered_tool_at_the_start_is_one(form: str) -> None:
    """Tags around calls are no words."""
    manner, how = format_of(form, "none"), FORMS[form].written
    text = "So: " + around(form, written(form, ONCE))
    check_spoken(manner, text, ("", text, []))
    text = around(form, written(form, {}, "leave"))
    words = text.removeprefix(how.before) if how.before in FORMS[form].dropped else text
    check_spoken(manner, text, ("", words, []))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "more",
    [
        {"$defs": {"tags": {"title": "a" * GRAMMAR_BYTES_MAX}}},
        {"not": {}},
        {"properties": {**SCHEMA["properties"], "times": {"type": "integer", "minimum": "1"}}},
    ],
)
def test_arguments_are_free_where_no_grammar_holds_their_schemas(form: str, more: dict[str, Any]) -> None:
    """One schema is too long, one asks for more than can be enforced, one is wrong."""
    function = Function(name="look", parameters={**SCHEMAS["look"], **more}, strict=True)
    tools = [Tool(type="function", function=function)]
    grammar = words_or_calls(Grammar(kind="json_object"), tools, format_of(form, "none"), {})
    assert vocabulary().takes(grammar, around(form, written(form, {"who": "Bob", "tags": []})))


@pytest.mark.parametrize(
    ("reasoning", "thought", "kept"),
    [
        ("granite", "Here's my thought process: Hm. Here is my response:", False),
        ("mistral", "[THINK]Hm.[/THINK]", False),
        ("gemma4", "<|channel>thought\nHm.<channel|>", False),
        ("minimax_m2_append_think", "<think>Hm.</think>", True),
    ],
)
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_thoughts_of_other_families(form: str, reasoning: str, thought: str, *, kept: bool) -> None:
    manner = replace(format_of(form, "none"), reasoning=THINKING[reasoning])
    grammar = words_or_calls(Grammar(kind="json_object"), TOOLS, manner, {})
    one, calls = around(form, written(form, ONCE)), [("look", plain(ONCE))]
    for text, words, called in (("{}", "{}", []), (one, "", calls)):
        assert vocabulary().takes(grammar, f"{thought}\n\n{text}")
        reasoned, *rest = spoken(manner, *f"{thought}\n\n{text}")
        assert (bool(reasoned), rest) == (not kept, [thought * kept + words, called])
