"""What a chat model says, told apart as it comes: its reasoning, its words, and its calls of tools.

    <think> reasoning </think> words <tool_call> call </tool_call> ...

The tags of Qwen and Hermes models; what a call looks like is in calls.py, how it is told while it comes in
calling.py. No text is lost: what looks like a call and is none is told as words.
"""

from dataclasses import dataclass
from typing import Literal

from tidemill.workers.api.calling import Calling
from tidemill.workers.api.calls import Call, Schemas
from tidemill.workers.api.text import growing

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a model's answer is to be read.

    thinks      it may begin with reasoning
    thinking    the prompt ends inside of that already
    calls       it may call tools; with `calls_max` 1, further calls are dropped
    schemas     of the tools, for a model that writes its calls as XML; None: it writes JSON
    """

    thinks: bool = False
    thinking: bool = False
    calls: bool = False
    calls_max: int | None = None
    schemas: Schemas | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    text: str


Part = Reasoning | Words | Call


class Speech:
    """The parts of one answer; no I/O. A tag may come in several pieces: what may become one is held back."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._inside: Literal["start", "reasoning", "words", "call"] = "words"
        if manner.thinks or manner.thinking:
            self._inside = "reasoning" if manner.thinking else "start"
        self._held = ""
        self._after_tag = manner.thinking  # white space there is nobody's words
        self._calling = Calling(0, manner.schemas)
        self.num_calls = 0

    def push(self, text: str, *, last: bool) -> list[Part]:
        """The parts that `text` completes; all that is left if it is the `last`."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts, last=last):
            pass
        return parts

    def _step(self, parts: list[Part], *, last: bool) -> bool:
        """Whether there may be more to find in what is held."""
        match self._inside:
            case "start":
                return self._start(last=last)
            case "reasoning":
                found = self._pass_on(parts, THOUGHT, Reasoning, last=last)
                if found:
                    self._go("words")
                return found
            case "words":
                found = self._pass_on(parts, CALL if self._manner.calls else "", Words, last=last)
                if found:
                    self._go("call")
                return found
            case "call":
                return self._call(parts, last=last)

    def _go(self, inside: Literal["reasoning", "words", "call"]) -> None:
        self._inside = inside
        self._after_tag = True
        if inside == "call":
            self._calling = Calling(self.num_calls, self._manner.schemas)

    def _start(self, *, last: bool) -> bool:
        """Reasoning, if the first thing that is no white space says so."""
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held = begun[len(THINK) :]
            self._go("reasoning")
            return True
        if not last and THINK.startswith(begun):
            return False
        self._inside = "words"
        return True

    def _pass_on(self, parts: list[Part], tag: str, kind: type[Reasoning | Words], *, last: bool) -> bool:
        """What is held, up to `tag` (if any) and without it. Whether it was found."""
        at = self._held.find(tag) if tag else -1
        cut = at if at >= 0 else len(self._held) - (0 if last else growing(self._held, (tag,)))
        text, self._held = self._held[:cut], self._held[cut + (len(tag) if at >= 0 else 0) :]
        if self._after_tag:
            text = text.lstrip()
        if text:
            self._after_tag = False
            parts.append(kind(text))
        return at >= 0

    def _call(self, parts: list[Part], *, last: bool) -> bool:
        at = self._held.find(CALLED)
        cut = at if at >= 0 else len(self._held) - (0 if last else growing(self._held, (CALLED,)))
        text, self._held = self._held[:cut], self._held[cut + (len(CALLED) if at >= 0 else 0) :]
        pieces = self._calling.push(text)
        if at >= 0 or last:
            left = self._calling.end(closed=at >= 0)
            if left is None:
                parts.append(Words(CALL + self._calling.held + (CALLED if at >= 0 else "")))
            pieces += left or []
        most = self._manner.calls_max
        if pieces and (most is None or pieces[0].index < most):
            self.num_calls = pieces[0].index + 1
            parts += pieces
        if at >= 0 or last:
            self._go("words")
        return at >= 0
