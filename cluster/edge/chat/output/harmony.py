"""Parses the channels of a model that writes in channels (Harmony, gpt-oss), as they arrive.

    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|> arguments <|call|>
    <|start|>assistant<|channel|>final<|message|> words <|return|>

The header before a <|message|> determines the kind of the text that follows.
The last tag ends the answer: the engine treats it as the end of the sequence, so it is not seen here.
"""

import re
from typing import Literal

from tidemill.cluster.edge.chat.formats import CALL_END, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat, OutputParser, Parser
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.cluster.edge.chat.text import first_of, growing

ENDS = (END, CALL_END, RETURN, START, CHANNEL)
HEADER_STARTS = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
HEADER_TAGS = re.compile("|".join(map(re.escape, (START, CHANNEL, CONSTRAIN))))
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ON_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
FUNCTIONS = "functions."


class Harmony(Parser):
    """The answer begins behind the role of its first message."""

    def __init__(self, output_format: OutputFormat) -> None:
        super().__init__(output_format)
        self._inside: Literal["start", "header", "reasoning", "words", "call"] = "start"
        self._name: str | None = None  # of the call, until its first piece was emitted
        self._dropped = False  # the open call is one too many
        if output_format.begun:
            self.push(output_format.begun, last=False)

    def _step(self, parts: list[Part], *, last: bool) -> bool:
        match self._inside:
            case "start":
                return self._start(last=last)
            case "header":
                return self._header(parts, last=last)
            case _:
                return self._message(parts, last=last)

    def _start(self, *, last: bool) -> bool:
        """Read the start. Text that starts like no header is words: the model was asked for that, or is
        wrong."""
        begun = self._held.lstrip()
        if any(begun.startswith(start) for start in HEADER_STARTS):
            self._inside = "header"
        elif not last and any(start.startswith(begun) for start in HEADER_STARTS):
            return False
        else:
            self._inside = "words"
        return True

    def _header(self, parts: list[Part], *, last: bool) -> bool:
        header, message, rest = self._held.partition(MESSAGE)
        if message:
            self._held = rest
            self._open(header)
            return True
        if last:
            text, self._held = self._held, ""
            if text and not HEADER_TAGS.search(text):
                parts.append(Text(text))
        return False

    def _open(self, header: str) -> None:
        """Open the text that follows a header."""
        to, on = RECIPIENT.search(header), ON_CHANNEL.search(header)
        name = to[1].removeprefix(FUNCTIONS) if to else ""
        called = bool(to and (to[1] != name or name in self._output_format.schemas))
        if called and self._output_format.form is not None:
            self._inside, self._name = "call", name
        elif (
            (to or (on and on[1] == "analysis")) and not called and self._output_format.reasoning is not None
        ):
            self._inside = "reasoning"
        else:
            self._inside = "words"

    def _message(self, parts: list[Part], *, last: bool) -> bool:
        # a grammar has one message behind the reasoning, to the end of the answer
        ends = () if self._output_format.constrained and self._inside != "reasoning" else ENDS
        at, tag = first_of(ends, self._held, len(self._held))
        if not tag and not last:
            at -= growing(self._held, ends)
        text, self._held = self._held[:at], self._held[at:]
        over = bool(tag) or last
        if self._inside == "call":
            parts += self._called(text, over=over)
        elif text:
            parts.append(ReasoningText(text) if self._inside == "reasoning" else Text(text))
        if tag:
            self._inside = "header"
            self._held = self._held.removeprefix(tag) if tag in ENDS[:3] else self._held
        return bool(tag)

    def _called(self, text: str, *, over: bool) -> list[Part]:
        """Return a piece of the open call. A call without arguments has those of an empty object."""
        name, most = self._name, self._output_format.calls_max
        if name is None:
            return [Call(self.num_calls - 1, None, text)] if text and not self._dropped else []
        text = text.lstrip()
        if not text and not over:
            return []
        self._name = None
        self._dropped = most is not None and self.num_calls >= most
        if self._dropped:
            return []
        self.num_calls += 1
        return [Call(self.num_calls - 1, name, text or "{}")]


def open_parser(output_format: OutputFormat) -> Parser:
    """Return the parser for an answer of this format."""
    return Harmony(output_format) if output_format.channels else OutputParser(output_format)
