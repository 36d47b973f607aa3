"""The interface of tokenizers, and the search for stop strings."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tidemill.cluster.edge.chat.families import Style
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

SLICE_TOKENS = 1 << 14


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


class TokenDecoder(Protocol):
    """The text of one stream of tokens, as far as its characters are complete."""

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty inside a character of several tokens and for special
        tokens."""
        ...


class Tokenizer(Protocol):
    """A tokenizer; several threads may call it concurrently, and other threads run while it encodes."""

    def encode(self, text: str) -> list[int]: ...

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text without those that begin or end every prompt."""
        ...

    def encode_marked(self, text: str, ends: Collection[int]) -> MarkedPrompt:
        """Return the tokens of a text, with breakpoints at the last tokens that end within its first `ends`
        characters."""
        ...

    @property
    def token_chars_max(self) -> int:
        """Return a length that no token's text exceeds."""
        ...

    @property
    def style(self) -> Style:
        """Return the formats of the model's calls and reasoning."""
        ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Return the sampling parameters of requests that name none."""
        ...

    @property
    def added(self) -> Mapping[str, int]:
        """Return the texts that are single tokens wherever they stand."""
        ...

    @property
    def template(self) -> str | None:
        """Return the text of the chat template."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Return whether `chat` takes tools."""
        ...

    @property
    def renders_inline(self) -> bool:
        """Return whether `chat` takes no longer for a template than for its text."""
        ...

    def chat(self, messages: Sequence[Message], how: Rendering = PLAIN) -> MarkedPrompt:
        """Return the tokens of a conversation, with breakpoints where its next requests and other
        conversations are likely to leave it. Raises RequestError."""
        ...

    def decoder(self, shown: Collection[str] = ()) -> TokenDecoder:
        """Return a decoder. Special tokens have no text except those that are `shown`."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character; empty for an unknown token."""
        ...


def marked_prompt(
    tokenizer: Tokenizer, prompt: str | list[int], breakpoints: Collection[int]
) -> MarkedPrompt:
    """Return a prompt with the breakpoints that its client names: in characters of a text, or in tokens.
    Raises RequestError."""
    if (last := max(breakpoints, default=0)) > len(prompt):
        unit = "tokens" if isinstance(prompt, list) else "characters"
        raise RequestError(
            f"cache_breakpoints: {last} is beyond the end of a prompt of {len(prompt)} {unit}",
            param="cache_breakpoints",
        )
    if isinstance(prompt, list):
        return MarkedPrompt(prompt, tuple(sorted(set(breakpoints))))
    return tokenizer.encode_marked(prompt, breakpoints)


def check_chars(chars: int, most: int, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are. Raises RequestError."""
    if chars > most:
        raise RequestError(
            f"{chars:,} characters are more than this model's maximum context length can hold, which is "
            f"{most:,} at most: shorten the {param}",
            param=param,
            code="context_length_exceeded",
        )


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens, including special ones. Other threads run between slices of it."""
    pieces = {token: tokenizer.piece(token) for token in set(tokens)}
    slices = (tokens[start : start + SLICE_TOKENS] for start in range(0, len(tokens), SLICE_TOKENS))
    written = [b"".join(map(pieces.__getitem__, part)) for part in slices]
    return b"".join(written).decode(errors="replace")


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
