"""Between tokens and text: what the edge needs of a tokenizer, and the search for stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat, as the model's template sees it."""

    role: str
    content: str


class Decoder(Protocol):
    """The text of one stream of tokens, as far as its characters are complete."""

    def push(self, token: int) -> str:
        """Text that `token` completes; empty inside a character of several tokens and for special tokens."""
        ...


class Tokenizer(Protocol):
    """May be called from several threads."""

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the model's answer starts. Raises RequestError."""
        ...

    def decoder(self) -> Decoder: ...


class StopScanner:
    """Passes text up to the first stop string: the one that ends first, or the longest of those that do.

    Text that may still grow into a stop string is held back, so that no part of one is ever passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._held: str = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be passed on now that `text` has come. Sets `stopped` at a stop string."""
        assert not self.stopped
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        cut = len(text) - self._growing(text)
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """What was held back: the text has ended, so it does not grow into a stop string."""
        held, self._held = self._held, ""
        return held

    def _growing(self, text: str) -> int:
        """Length of the longest end of `text` that starts a stop string."""
        sizes = (
            size
            for stop in self._stops
            for size in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        )
        return max(sizes, default=0)
