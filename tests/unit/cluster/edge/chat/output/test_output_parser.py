"""The parts of a model's output are the same however its text is cut, and nothing of it is lost."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cluster.edge.chat.spoken import parsed
from tidemill.cluster.edge.chat.formats import (
    CALL,
    CALLED,
    CHANNEL,
    FINAL,
    FORMS,
    KIMI_ARGUMENTS,
    MESSAGE,
    QUOTE,
    SPOKEN_IN_CHANNELS,
    THINKING,
    THOUGHT,
)
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text

THINK, HERMES = THINKING["qwen3"], FORMS["hermes"]
ALL = OutputFormat(reasoning=THINK, form=HERMES)
CALLING = '<tool_call>\n{"name": "look", "arguments": {"at": "the harbor"}}\n</tool_call>'
LOOK = Call(0, "look", '{"at": "the harbor"}')
HM, YES = ReasoningText("Hm."), Text("Yes.")


SCHEMAS = {
    "f": {"properties": {"note": {"type": "string"}, "n": {"type": "integer"}}},
    "look": {"properties": {"at": {"type": "string"}}},
}
INSIDE = OutputFormat(form=HERMES, reasoning=THINK, thinking=True, schemas=SCHEMAS)
UNKNOWN = f'I may write {CALL}{{"name": "h", "arguments": {{}}}}{CALLED} here.'
THOUGHTS: list[tuple[str, bool, str, list[Part]]] = [
    ("kimi_k2", True, f"Hm.{THOUGHT}Yes.", [HM, YES]),
    ("kimi_k2", True, f"<think>Hm.{THOUGHT}Yes.", [HM, YES]),
    ("qwen3", True, f" <think>\nHm.{THOUGHT}\n\nYes.", [HM, YES]),
    ("minimax_m2_append_think", True, f"\nHm.{THOUGHT}\n\nYes.", [Text(f"<think>\nHm.{THOUGHT}\n\nYes.")]),
    ("minimax_m2_append_think", False, "Yes.", [YES]),
    ("gemma4", False, "<|channel>thought\nHm.<channel|>Yes.", [HM, YES]),
    ("gemma4", False, "<|channel>thought\n<channel|>Yes.", [YES]),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", [HM, YES]),
    ("nemotron_v3", True, f"Hm.{THOUGHT}Yes.", [HM, YES]),
]


@pytest.mark.parametrize(
    ("manner", "text", "parts"),
    [
        *(
            (OutputFormat(reasoning=THINKING[reasoning], thinking=thinking), text, parts)
            for reasoning, thinking, text, parts in THOUGHTS
        ),
        (INSIDE, f"Hm.{CALLING}", [HM, LOOK]),
        (INSIDE, f"Hm.{CALLING} So.{THOUGHT}Yes.", [HM, LOOK, ReasoningText("So."), YES]),
        (INSIDE, f"{UNKNOWN}{THOUGHT}Yes.", [ReasoningText(UNKNOWN), YES]),
        (INSIDE, f"{CALL} is a tag.{THOUGHT}Yes.", [ReasoningText(f"{CALL} is a tag."), YES]),
        (OutputFormat(), "<think>no</think>" + CALLING, [Text("<think>no</think>" + CALLING)]),
        (ALL, "Hello", [Text("Hello")]),
        (ALL, " \n<think>\nHm.</think>\n\nHello", [ReasoningText("Hm."), Text("Hello")]),
        (ALL, "a <think>b</think>", [Text("a <think>b</think>")]),
        (ALL, "<think>cut", [ReasoningText("cut")]),
        (ALL, "  ", [Text("  ")]),
        (
            OutputFormat(reasoning=THINK, thinking=True),
            "\nHm.\n</think>\n\nYes",
            [ReasoningText("Hm.\n"), Text("Yes")],
        ),
        (ALL, CALLING, [LOOK]),
        (ALL, f"Let me see.\n{CALLING}", [Text("Let me see.\n"), LOOK]),
        (ALL, f"{CALLING}\n{CALLING}", [LOOK, Call(1, LOOK.name, LOOK.arguments)]),
        (OutputFormat(form=HERMES, calls_max=1), f"{CALLING}\n{CALLING}", [LOOK]),
        (ALL, '<tool_call>{"name": "now"}</tool_call>', [Call(0, "now", "{}")]),
        (ALL, '<tool_call>{"name": "now", "arguments": {}}', [Call(0, "now", "{}")]),
        (ALL, "<tool_call>{oh</tool_call> well", [Text("<tool_call>{oh</tool_call> well")]),
        (ALL, '<tool_call>{"name": 3, "arguments": {}}', [Text('<tool_call>{"name": 3, "arguments": {}}')]),
        (ALL, "a < b and <tool", [Text("a < b and <tool")]),
        *(
            (ALL, f"<tool_call>{body}", [Call(0, "f", arguments)])
            for body, arguments in [
                ('{"name": "f", "arguments": {"a": "}\\"{"}, "id": 3}</tool_call>', '{"a": "}\\"{"}'),
                ('{"name": "f", "arguments": {"a": {"b": {}}}}</tool_call>', '{"a": {"b": {}}}'),
                ('{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
                ('{"name": "f", "arguments": {"a": "cut', '{"a": "cut'),
                ('{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
            ]
        ),
    ],
)
def test_parts_of_an_answer_in_one_piece_and_letter_by_letter(
    manner: OutputFormat, text: str, parts: list[Part]
) -> None:
    assert parsed(manner, text) == parts
    assert parsed(manner, *text) == parts


STREAMS: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        ('<tool_call>{"name": "f", "argu', ""),
        ('ments": {"a', '{"a'),
        ('": "x y', '": "x y'),
        (" z", " z"),
        ('"}}\n</tool', '"}'),
        ("_call>", ""),
    ],
    "qwen3_coder": [
        (f"{CALL}<function=f><parameter=note>\n", '{"note": "'),
        ('a "b"\n', 'a \\"b\\"'),
        ("c\n</para", "\\nc"),
        ("meter>", '"'),
        ("</function>\n", "}"),
        (CALLED, ""),
    ],
    "openai": [
        (f"{CHANNEL}commentary to=functions.f<|mess", ""),
        ('age|> {"at', '{"at'),
        ('": "x <', '": "x '),
        (' y"}<|call', '< y"}'),
        ("|>", ""),
    ],
}


@pytest.mark.parametrize("form", STREAMS)
def test_arguments_are_streamed(form: str) -> None:
    parser = open_parser(OutputFormat(form=FORMS[form], schemas=SCHEMAS, channels=form == "openai"))
    name: str | None = "f"
    for piece, arguments in STREAMS[form]:
        expected = [Call(0, name, arguments)] if arguments else []
        assert parser.push(piece, last=piece == STREAMS[form][-1][0]) == expected
        name = None if arguments else name
    assert parser.num_calls == 1


SNIPPETS = {
    "json": ['{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {', "[", "]", ";", ","],
    "xml": ["<function=f>", "</function>", "<parameter=note>", "<parameter=n>", "</parameter>"],
    "gemma": ["call:f{", "call:g{}", "note:", "n:", QUOTE, "[", "]", ",", "12"],
    "python": ["[", "]", "f(", "f(note='a', n=[1])", ")", ",", "f.g", "'"],
    "channels": [
        FINAL,
        f"{CHANNEL}analysis{MESSAGE}",
        f"{CHANNEL}commentary to=functions.f{MESSAGE}",
        " to=f",
    ],
}
LETTERS = ["<", ">", "|", "think", " ", "\n", "a", "\u00e9", "{", '"', "}", "\\", "```json", "function", "g"]


@st.composite
def spoken(draw: st.DrawFn) -> tuple[OutputFormat, str]:
    """A manner, and what might be an answer in it."""
    form = draw(st.sampled_from([None, *FORMS.values()]))
    channels = form is FORMS["openai"] or (form is None and draw(st.booleans()))
    manner = OutputFormat(
        reasoning=draw(st.sampled_from([None, SPOKEN_IN_CHANNELS]))
        if channels
        else draw(st.sampled_from([None, *THINKING.values()])),
        thinking=not channels and draw(st.booleans()),
        form=form,
        calls_max=draw(st.sampled_from([None, 1])),
        schemas=SCHEMAS,
        constrained=draw(st.booleans()),
        channels=channels,
        begun=draw(st.sampled_from(["", FINAL])) if channels else "",
    )
    if manner.reasoning is None or not manner.reasoning.close:
        manner = replace(manner, thinking=False)
    snippets = SNIPPETS["channels" if form is None else form.body]
    if form is not None and form.parameters is not None:
        names = [form.parameters.before.format(name=name, is_text="true") for name in ("note", "n")]
        named = (f"{form.element}{mark}f{mark}>" for mark in ('"', ""))
        snippets = [*snippets, *names, *named, *form.parameters.ends, form.parameters.closes]
    if form is FORMS["mistral"]:
        snippets = [*snippets, "f[ARGS]", "g{}"]
    if form is FORMS["kimi_k2"]:
        snippets = [*snippets, f"functions.f:1{KIMI_ARGUMENTS}{{", f"g{KIMI_ARGUMENTS}"]
    bits = [*manner.tags, *(form.tags if form else ()), *snippets, *snippets, *LETTERS]
    return manner, "".join(draw(st.lists(st.sampled_from(bits), max_size=16)))


@settings(max_examples=400)
@given(spoken=spoken(), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_parts_do_not_depend_on_how_the_text_is_cut(
    spoken: tuple[OutputFormat, str], cuts: list[int]
) -> None:
    manner, text = spoken
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = parsed(manner, text)
    assert parsed(manner, *pieces) == whole
    assert parsed(manner, *text) == whole


@settings(max_examples=200)
@given(spoken=spoken())
def test_shown_text_is_never_more_than_the_output(spoken: tuple[OutputFormat, str]) -> None:
    """All but tags and white space is shown, if there are no calls to drop."""
    manner, text = spoken
    parts = parsed(manner, text)
    shown = "".join(part.text for part in parts if not isinstance(part, Call))
    kept = manner.reasoning is not None and manner.reasoning.kept
    rest = iter("<think>" + text if kept else text)
    assert all(char in rest for char in shown), "something was made up, or its order changed"
    if manner.form is None and not manner.channels:
        bare = text
        for tag in manner.tags:
            bare, shown = bare.replace(tag, ""), shown.replace(tag, "")
        assert "".join(shown.split()) == "".join(bare.split())
