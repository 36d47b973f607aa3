"""Separates the reasoning, the words and the tool calls of a chat model's answer, as they arrive.

    <think> reasoning </think> words <tool_call> call </tool_call> ...

The tags are data (formats.py). tool_call_stream.py parses a call while it arrives, and harmony.py reads
models that write in channels. No text is lost: text that looks like a call and is none counts as words.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tidemill.cluster.edge.chat.formats import BREAK, CHANNELS, CallForm, Thinking
from tidemill.cluster.edge.chat.output.parts import Part, ReasoningText, Text
from tidemill.cluster.edge.chat.output.tool_call_parser import Schemas
from tidemill.cluster.edge.chat.output.tool_call_stream import ToolCallStream
from tidemill.cluster.edge.chat.text import first_of, growing

BETWEEN = re.compile(r"\s*([;,]?)\s*")
"""The text between two calls that have no tags."""

FENCE = "```"
LEFT = re.compile(rf"[\s,;\]}}]*(?:{FENCE}\s*)?")
"""The text between a call and its end tag, or the next call before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """The format of one answer.

    reasoning    how it may reason; None: all its text is words
    thinking     the prompt already ends inside of reasoning
    form         of its calls; None: it may call nothing
    calls_max    1: further calls are dropped
    schemas      of the arguments, by function
    forced       it is calls alone: a piece of a tag at its end is no words
    constrained  a grammar allows calls at its start alone, of known functions, and none in its reasoning
    channels     the model writes in channels
    begun        the part of the answer at the end of the prompt
    """

    reasoning: Thinking | None = None
    thinking: bool = False
    form: CallForm | None = None
    calls_max: int | None = None
    schemas: Schemas = field(default_factory=dict[str, dict[str, object]])
    forced: bool = False
    constrained: bool = False
    channels: bool = False
    begun: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that the parser needs to see."""
        if self.channels:
            return CHANNELS
        return (*(self.reasoning.tags if self.reasoning else ()), *(self.form.tags if self.form else ()))


class Parser(ABC):
    """Separates the parts of one answer; no I/O. However the text is cut, the parts add up to the same."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._output_format = output_format
        self._held: str = ""
        self.num_calls = 0

    def push(self, text: str, *, last: bool) -> list[Part]:
        """Return the parts that `text` completes; everything that is left if it is the `last`."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts, last=last):
            pass
        return [part for part in parts if not (self._output_format.forced and isinstance(part, Text))]

    @abstractmethod
    def _step(self, parts: list[Part], *, last: bool) -> bool:
        """Take one step; return whether the held text may contain more."""


class OutputParser(Parser):
    """A tag may arrive in several pieces, so text that may become one is held back."""

    def __init__(self, output_format: OutputFormat) -> None:
        super().__init__(output_format)
        self._thinking = output_format.reasoning or Thinking()
        self._inside: Literal["start", "reasoning", "words", "call", "between"] = "start"
        self._outside: Literal["reasoning", "words"] = "words"  # of calls
        if output_format.thinking:
            self._outside = "reasoning"
        self._after_tag = output_format.thinking  # white space there belongs to no words
        self._begin = ""  # the tag before the call
        self._calling: ToolCallStream | None = None
        self._silent = True  # neither words nor calls so far

    def _step(self, parts: list[Part], *, last: bool) -> bool:
        match self._inside:
            case "start":
                return self._start(parts, last=last)
            case "reasoning":
                return self._reasoning(parts, last=last)
            case "words":
                return self._words(parts, last=last)
            case "call":
                return self._call(parts, last=last)
            case "between":
                return self._between(last=last)

    def _go(self, inside: Literal["reasoning", "words", "between"], *, after_tag: bool) -> None:
        self._inside = inside
        self._after_tag = after_tag

    def _start(self, parts: list[Part], *, last: bool) -> bool:
        """Start with reasoning, if the prompt or the first text that is not white space opens it."""
        begun = self._held if self._output_format.constrained else self._held.lstrip()
        tag = next(filter(begun.startswith, self._thinking.opens), None)
        if tag is not None:
            self._held = begun[len(tag) :]
            self._outside = "reasoning"
        elif not last and any(tag.startswith(begun) for tag in self._thinking.opens):
            return False
        thinks = self._outside == "reasoning"
        if thinks and self._thinking.kept:
            parts.append(Text(self._thinking.opens[0]))
        self._go(self._outside, after_tag=thinks and not self._thinking.kept)
        return True

    def _reasoning(self, parts: list[Part], *, last: bool) -> bool:
        """Pass on reasoning. A call of a known function inside is one: not every model closes a thought."""
        form, close, kept = self._output_format.form, self._thinking.close, self._thinking.kept
        constrained = self._output_format.constrained
        tags = (*form.begins, *form.dropped) if form is not None and not constrained else ()
        found = self._pass_on(parts, (close, *tags), self._outside_kind, last=last)
        if form is not None and found in form.begins:
            self._call_next(form, found)
        elif found == close:
            parts += [Text(close)] if kept else []
            self._outside = "words"
            self._silent = self._silent or constrained
            self._go("words", after_tag=not kept or constrained)
        return bool(found)

    @property
    def _outside_kind(self) -> type[ReasoningText | Text]:
        return ReasoningText if self._outside == "reasoning" and not self._thinking.kept else Text

    def _words(self, parts: list[Part], *, last: bool) -> bool:
        form, constrained = self._output_format.form, self._output_format.constrained
        if self._after_tag and constrained and not self.num_calls:
            if not last and BREAK.startswith(self._held):
                return False
            self._held = self._held.removeprefix(BREAK)
            self._after_tag = False
        if form is None:
            self._pass_on(parts, (), Text, last=last)
            return False
        if self._after_tag:
            self._held = self._held.lstrip()
        if self._silent and form.bare:
            begun = self._held if constrained else self._held.lstrip()
            if not begun and not last:
                return False
            if begun.startswith(form.bare):
                self._call_next(form, "")
                return True
        tags = (*form.begins, *form.dropped)
        tag = self._pass_on(parts, tags if self._may_call(tags) else (), Text, last=last)
        if tag in form.begins:
            self._call_next(form, tag)
        elif tag:
            self._after_tag = True
        return bool(tag)

    def _may_call(self, tags: Sequence[str]) -> bool:
        """Return whether one of the tags may begin a call: anywhere, or where a grammar allows it."""
        if not self._output_format.constrained or self.num_calls:
            return True
        return self._silent and any(tag.startswith(self._held[: len(tag)]) for tag in tags)

    def _pass_on(
        self, parts: list[Part], tags: Sequence[str], kind: type[ReasoningText | Text], *, last: bool
    ) -> str:
        """Pass on the held text up to the first of the `tags`; return that tag, empty if there is none."""
        at, tag = first_of(tags, self._held, len(self._held))
        if not tag and not last:
            at -= growing(self._held, tags)
        text, self._held = self._held[:at], self._held[at + len(tag) :]
        if self._after_tag:
            text = text.lstrip()
        if text:
            self._after_tag = False
            self._silent = self._silent and kind is ReasoningText
            parts.append(kind(text))
        return tag

    def _call_next(self, form: CallForm, begin: str) -> None:
        self._inside = "call"
        self._begin = begin
        if form.element and begin == form.element:  # a part of the call itself
            self._begin, self._held = "", begin + self._held
        self._calling = ToolCallStream(
            self.num_calls,
            form,
            self._output_format.schemas,
            self._thinking.close if self._outside == "reasoning" else "",
            exact=self._output_format.constrained,
        )

    def _call(self, parts: list[Part], *, last: bool) -> bool:
        form, calling = self._output_format.form, self._calling
        assert form is not None
        assert calling is not None
        pieces = calling.push(self._held, last=last)
        self._held = calling.rest or ""
        over = calling.rest is not None
        if over or last:
            left = calling.end()
            if left is None:
                closed = form.ends if self._held.startswith(form.ends) else ""
                self._held = self._held.removeprefix(closed)
                parts.append(self._outside_kind(self._begin + calling.held + closed))
            self._go("between" if over and left is not None else self._outside, after_tag=left is not None)
            pieces += left or []
        most = self._output_format.calls_max
        if pieces and (most is None or pieces[0].index < most):
            self.num_calls = pieces[0].index + 1
            parts += pieces
        self._silent = self._silent and not over
        return over

    def _between(self, *, last: bool) -> bool:
        """Read what follows a call: another one before its end tag, or without tags, or something else."""
        form = self._output_format.form
        assert form is not None
        between = (LEFT if form.ends else BETWEEN).match(self._held)
        assert between is not None
        begin, rest = between[0], self._held[between.end() :]
        starts = form.starts(self._output_format.schemas)
        if not last and any(sign.startswith(rest) for sign in (form.ends, *starts, FENCE)):
            return False
        if form.ends and rest.startswith(form.ends):
            self._held = rest.removeprefix(form.ends)
            self._go(self._outside, after_tag=True)
            return True
        if form.body == "python":
            follows = rest[:1].isidentifier() and bool(between[1])
        else:
            follows = rest.startswith(starts)
        if follows:
            self._held = rest
            self._call_next(form, begin)
            return True
        if form.ends:
            self._held = rest
        elif rest[:1] == "]" and not between[1]:
            self._held = rest[1:]
        self._go(self._outside, after_tag=True)
        return True
