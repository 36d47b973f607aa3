"""The parts of an answer: reasoning, words, and tool calls, each in pieces as they arrive."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call, or a piece of one. The first piece has the name, and the arguments of all pieces add up to the
    text of a JSON object."""

    index: int
    name: str | None
    arguments: str


Part = ReasoningText | Text | Call


def joined(pieces: Iterable[Call]) -> list[Call]:
    """Return the calls with all pieces of each call joined."""
    whole: dict[int, Call] = {}
    for piece in pieces:
        before = whole.get(piece.index)
        whole[piece.index] = (
            piece if before is None else Call(piece.index, before.name, before.arguments + piece.arguments)
        )
    return list(whole.values())
