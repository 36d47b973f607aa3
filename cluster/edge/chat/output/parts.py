"""What an answer is made of: reasoning, words, and calls of tools, each piece as it comes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call, or a piece of one: the first piece has the name, and the arguments of all of them add up to the
    text of a JSON object."""

    index: int
    name: str | None
    arguments: str


Part = ReasoningText | Text | Call


class Parser(Protocol):
    """Tells the parts of one answer apart; no I/O. However the text is cut, the parts add up to the same."""

    num_calls: int

    def push(self, text: str, *, last: bool) -> list[Part]:
        """The parts that `text` completes; all that is left if it is the `last`."""
        ...


def joined(pieces: Iterable[Call]) -> list[Call]:
    """The same with what there is of each call in one piece."""
    whole: dict[int, Call] = {}
    for piece in pieces:
        before = whole.get(piece.index)
        whole[piece.index] = (
            piece if before is None else Call(piece.index, before.name, before.arguments + piece.arguments)
        )
    return list(whole.values())
