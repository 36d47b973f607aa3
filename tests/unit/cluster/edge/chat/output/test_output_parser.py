"""The parts of a model's output are the same however its text is cut, and nothing of it is lost."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.edge.chat.formats import (
    CHANNEL,
    FINAL,
    FORMS,
    KIMI_ARGUMENTS,
    MESSAGE,
    QUOTE,
    SPOKEN_IN_CHANNELS,
    THINKING,
)
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat, OutputParser
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text

THINK, HERMES = THINKING["qwen3"], FORMS["hermes"]
ALL = OutputFormat(reasoning=THINK, form=HERMES)
CALLING = '<tool_call>\n{"name": "look", "arguments": {"at": "the harbor"}}\n</tool_call>'
LOOK = Call(0, "look", '{"at": "the harbor"}')


def parsed(manner: OutputFormat, *pieces: str) -> list[Part]:
    speech = open_parser(manner)
    parts = [part for piece in pieces for part in speech.push(piece, last=False)]
    return joined([*parts, *speech.push("", last=True)])


def joined(parts: Sequence[Part]) -> list[Part]:
    """Texts of one kind in a row are one, and pieces of a call."""
    whole: list[Part] = []
    for part in parts:
        before = whole[-1] if whole else None
        if isinstance(part, Text) and isinstance(before, Text):
            whole[-1] = Text(before.text + part.text)
        elif isinstance(part, ReasoningText) and isinstance(before, ReasoningText):
            whole[-1] = ReasoningText(before.text + part.text)
        elif isinstance(part, Call) and part.name is None:
            assert isinstance(before, Call), "pieces of a call come one after another"
            assert before.index == part.index
            whole[-1] = Call(before.index, before.name, before.arguments + part.arguments)
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize(
    ("manner", "text", "parts"),
    [
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
    ],
)
def test_parts_of_an_answer_in_one_piece_and_letter_by_letter(
    manner: OutputFormat, text: str, parts: list[Part]
) -> None:
    assert parsed(manner, text) == parts
    assert parsed(manner, *text) == parts


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "}\\"{"}, "id": 3}</tool_call>', '{"a": "}\\"{"}'),
        ('{"name": "f", "arguments": {"a": {"b": {}}}}</tool_call>', '{"a": {"b": {}}}'),
        ('{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "cut', '{"a": "cut'),
        ('{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
    ],
)
def test_arguments_are_sent_as_the_model_writes_them(body: str, arguments: str) -> None:
    assert parsed(ALL, *f"<tool_call>{body}") == [Call(0, "f", arguments)]


def test_arguments_are_streamed() -> None:
    speech = OutputParser(ALL)
    assert speech.push('<tool_call>{"name": "f", "argu', last=False) == []
    assert speech.push('ments": {"a', last=False) == [Call(0, "f", '{"a')]
    assert speech.push('": "x y', last=False) == [Call(0, None, '": "x y')]
    assert speech.push(" z", last=False) == [Call(0, None, " z")]
    assert speech.push('"}}\n</tool', last=False) == [Call(0, None, '"}')]
    assert speech.push("_call>", last=True) == []


SCHEMAS = {"f": {"properties": {"note": {"type": "string"}, "n": {"type": "integer"}}}}
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
