"""Chats as templates see them, prompts with their breakpoints, and the search for stop strings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.workers.messages import RequestError


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat, as the model's template sees it; `more` has the fields of some messages
    (tool_calls, tool_call_id, name, reasoning_content)."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """The rendering of a chat.

    tools      as the template wants them
    answers    the prompt ends where the model's answer starts
    continues  it ends inside of the last message, which the model continues
    options    variables of the template
    chars_max  a longer chat is refused before it is tokenized

    Clients mark where later chats will leave this one: behind some characters of a message, or behind
    the first tools.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    answers: bool = True
    continues: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chars_max: int | None = None
    message_marks: Sequence[tuple[int, int]] = ()  # (index of the message, characters)
    tool_marks: Sequence[int] = ()


PLAIN = Rendering()


class MarkedPrompt(NamedTuple):
    """The tokens of a prompt, and the depths, ascending, where later prompts are likely to leave it."""

    tokens: list[int]
    breakpoints: tuple[int, ...] = ()

    def cut(self, most: int, *, at_start: bool) -> "MarkedPrompt":
        """Return the last `most` tokens if it is cut at the start, else the first ones."""
        begin = max(0, len(self.tokens) - most) if at_start else 0
        tokens = self.tokens[begin : begin + most]
        shifted = (depth - begin for depth in self.breakpoints)
        return MarkedPrompt(tokens, tuple(depth for depth in shifted if 0 < depth <= len(tokens)))


def check_chars(chars: int, most: int, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are. Raises RequestError."""
    if chars > most:
        raise RequestError(
            f"{chars:,} characters are more than this model's maximum context length can hold, which is "
            f"{most:,} at most: shorten the {param}",
            param=param,
            code="context_length_exceeded",
        )


def first_of(into: Iterable[str], text: str, nowhere: int = 0) -> tuple[int, str]:
    """Return where the first of the texts in `into` stands, and which it is; `nowhere` and no text if none
    does."""
    found = ((at, part) for part in into if (at := text.find(part)) >= 0)
    return min(found, default=(nowhere, ""))


def growing(text: str, into: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may grow into one of the texts in `into`."""
    sizes = (
        size
        for whole in into
        for size in range(1, min(len(whole), len(text) + 1))
        if text.endswith(whole[:size])
    )
    return max(sizes, default=0)


class StopScanner:
    """Passes text up to the first stop string: the one that ends first, or the longest of those that do.

    Text that may grow into a stop string is held back, so that no part of one is passed on.
    With `include` the stop string itself is passed on.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._include = include
        self._held: str = ""
        self.stop: str | None = None  # the one that was found

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that can be passed on now that `text` has arrived. Sets `stop` at a stop string.

        A stop string that ends in text which may not stop does not count; one that only starts there does.
        """
        assert self.stop is None
        held = len(self._held)
        text = self._held + text
        found = self._first_end(text, held) if may_stop else None
        if found is not None:
            end, start, self.stop = found
            self._held = ""
            return text[: end if self._include else start]
        cut = len(text) - growing(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        return held

    def _first_end(self, text: str, old: int) -> tuple[int, int, str] | None:
        """Return end, start and stop string of the match that ends first behind the `old` characters; the
        longest, if several do."""
        matches = (
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, old + 1 - len(stop)))) >= 0
        )
        return min(matches, default=None)
