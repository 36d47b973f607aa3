"""What a model says, told apart: the same however its text is cut, and nothing of it is lost."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.workers.api.calls import Call
from tidemill.workers.api.speech import Manner, Part, Reasoning, Speech, Words

ALL = Manner(thinks=True, calls=True)
CALLING = '<tool_call>\n{"name": "look", "arguments": {"at": "the harbor"}}\n</tool_call>'
LOOK = Call(0, "look", '{"at": "the harbor"}')


def said(manner: Manner, *pieces: str) -> list[Part]:
    speech = Speech(manner)
    parts = [part for piece in pieces for part in speech.push(piece, last=False)]
    return joined([*parts, *speech.push("", last=True)])


def joined(parts: Sequence[Part]) -> list[Part]:
    """Texts of one kind in a row are one, and pieces of a call."""
    whole: list[Part] = []
    for part in parts:
        before = whole[-1] if whole else None
        if isinstance(part, Words) and isinstance(before, Words):
            whole[-1] = Words(before.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(before, Reasoning):
            whole[-1] = Reasoning(before.text + part.text)
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
        (Manner(), "<think>no</think>" + CALLING, [Words("<think>no</think>" + CALLING)]),
        (ALL, "Hello", [Words("Hello")]),
        (ALL, " \n<think>\nHm.</think>\n\nHello", [Reasoning("Hm."), Words("Hello")]),
        (ALL, "a <think>b</think>", [Words("a <think>b</think>")]),
        (ALL, "<think>cut", [Reasoning("cut")]),
        (ALL, "  ", [Words("  ")]),
        (Manner(thinks=True, thinking=True), "\nHm.\n</think>\n\nYes", [Reasoning("Hm.\n"), Words("Yes")]),
        (ALL, CALLING, [LOOK]),
        (ALL, f"Let me see.\n{CALLING}", [Words("Let me see.\n"), LOOK]),
        (ALL, f"{CALLING}\n{CALLING}", [LOOK, Call(1, LOOK.name, LOOK.arguments)]),
        (Manner(calls=True, calls_max=1), f"{CALLING}\n{CALLING}", [LOOK]),
        (ALL, '<tool_call>{"name": "now"}</tool_call>', [Call(0, "now", "{}")]),
        (ALL, '<tool_call>{"name": "now", "arguments": {}}', [Call(0, "now", "{}")]),
        (ALL, "<tool_call>{oh</tool_call> well", [Words("<tool_call>{oh</tool_call>well")]),
        (ALL, '<tool_call>{"name": 3, "arguments": {}}', [Words('<tool_call>{"name": 3, "arguments": {}}')]),
        (ALL, "a < b and <tool", [Words("a < b and <tool")]),
    ],
)
def test_parts_of_an_answer_in_one_piece_and_letter_by_letter(
    manner: Manner, text: str, parts: list[Part]
) -> None:
    assert said(manner, text) == parts
    assert said(manner, *text) == parts


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
def test_arguments_are_told_as_the_model_writes_them(body: str, arguments: str) -> None:
    assert said(ALL, *f"<tool_call>{body}") == [Call(0, "f", arguments)]


def test_arguments_are_told_as_they_come() -> None:
    speech = Speech(ALL)
    assert speech.push('<tool_call>{"name": "f", "argu', last=False) == []
    assert speech.push('ments": {"a', last=False) == [Call(0, "f", '{"a')]
    assert speech.push('": "x y', last=False) == [Call(0, None, '": "x y')]
    assert speech.push(" z", last=False) == [Call(0, None, " z")]
    assert speech.push('"}}\n</tool', last=False) == [Call(0, None, '"}')]
    assert speech.push("_call>", last=True) == []


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}']
XML_TAGS = ["<function=f>", "</function>", "<parameter=note>", "<parameter=n>", "</parameter>"]
SCHEMAS = {"f": {"properties": {"note": {"type": "string"}, "n": {"type": "integer"}}}}
BITS = [*TAGS, *TAGS[2:4], *XML_TAGS, "<", ">", "think", " ", "\n", "a", "\u00e9", "{", '"', "}", "\\"]
TEXTS = st.lists(st.sampled_from(BITS), max_size=16).map("".join)
MANNERS = st.builds(
    Manner,
    thinks=st.booleans(),
    thinking=st.booleans(),
    calls=st.booleans(),
    calls_max=st.sampled_from([None, 1]),
    schemas=st.sampled_from([None, SCHEMAS]),
)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=6), manner=MANNERS)
def test_the_parts_do_not_depend_on_how_the_text_is_cut(text: str, cuts: list[int], manner: Manner) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert said(manner, *pieces) == said(manner, text)


@given(text=TEXTS, manner=MANNERS)
def test_what_shows_is_never_more_than_what_was_said(text: str, manner: Manner) -> None:
    """And without calls to drop, all but tags and white space shows."""
    parts = said(manner, text)
    shown = "".join(part.text for part in parts if not isinstance(part, Call))
    rest = iter(text)
    assert all(char in rest for char in shown), "something was made up, or its order changed"
    if not manner.calls:
        bare = text
        for tag in ("<think>", "</think>"):
            bare, shown = bare.replace(tag, ""), shown.replace(tag, "")
        assert "".join(shown.split()) == "".join(bare.split())
