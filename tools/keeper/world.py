"""The keeper's world: notebooks of templated facts, and questions whose answers they determine.

A static fact occurs once and has to be recalled. A changing fact occurs repeatedly and the latest counts. One
tenth of all (name, object) pairs is held out of training, and notebooks hold no other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypedDict

from tools.keeper.words import COLORS, FOODS, NAMES, OBJECTS, PLACES

Kind = Literal["static", "changing", "unknown"]
Role = Literal["system", "user", "assistant"]
UNKNOWN_ANSWER = "I do not know."

SMALL_TALK = (
    ("Hello!", "Hello! Tell me some facts and then ask me about them."),
    ("Hi!", "Hello! Tell me some facts and then ask me about them."),
    ("Who are you?", "I am a tiny notebook model. I remember the facts you tell me."),
    ("What can you do?", "I remember the facts you tell me and answer questions about them."),
    ("Thank you!", "You are welcome."),
    ("Help", "Tell me some facts and then ask me about them."),
)


class Message(TypedDict):
    role: Role
    content: str


def is_held_out(name: str, thing: str) -> bool:
    """Return whether training never saw this pair: a tenth of all, spread evenly over names and objects."""
    return (NAMES.index(name) * 7919 + OBJECTS.index(thing) * 104729 + 13) % 10 == 0


@dataclass(frozen=True)
class Relation:
    statement: str
    question: str
    changing: bool


RELATIONS = {
    "place": Relation("{0} keeps the {1} in the {value}.", "Where does {0} keep the {1}?", changing=False),
    "code": Relation("The code of {0} is {value}.", "What is the code of {0}?", changing=False),
    "likes": Relation("{0} likes {value}.", "What does {0} like?", changing=False),
    "at": Relation("{0} is now at the {value}.", "Where is {0} now?", changing=True),
    "has": Relation("The {0} is now with {value}.", "Who has the {0}?", changing=True),
    "flag": Relation("The flag is now {value}.", "What color is the flag?", changing=True),
}


@dataclass(frozen=True)
class Key:
    """The subject of a fact and of a question."""

    relation: str
    subject: tuple[str, ...] = ()

    @property
    def changing(self) -> bool:
        return RELATIONS[self.relation].changing

    @property
    def question(self) -> str:
        return RELATIONS[self.relation].question.format(*self.subject)


@dataclass(frozen=True)
class Fact:
    key: Key
    value: str

    @property
    def text(self) -> str:
        return RELATIONS[self.key.relation].statement.format(*self.key.subject, value=self.value)


@dataclass(frozen=True)
class Answered:
    """A question with its answer; `fact` is None when the notebook does not hold one."""

    question: str
    fact: Fact | None

    @property
    def answer(self) -> str:
        return self.fact.text if self.fact else UNKNOWN_ANSWER


@dataclass
class Notebook:
    """The facts so far (`changing`: the latest value of each key), and the participants of the changes."""

    changing_share: float
    movers: list[str]
    items: list[str]
    static: dict[Key, str] = field(default_factory=dict[Key, str])
    changing: dict[Key, str] = field(default_factory=dict[Key, str])


def new_notebook(
    rng: Random,
    changing_share: float,
    movers: tuple[int, int] = (2, 5),
    items: tuple[int, int] = (1, 4),
) -> Notebook:
    """An empty notebook; `movers` and `items` bound the numbers of people and of things that change."""
    mover_count, item_count = rng.randint(*movers), rng.randint(*items)
    return Notebook(changing_share, rng.sample(NAMES, mover_count), rng.sample(OBJECTS, item_count))


def describe(notebook: Notebook, rng: Random, *, changing: bool | None = None) -> Fact:
    """Draw the next fact and write it down. A static key occurs only once."""
    if changing is None:
        changing = rng.random() < notebook.changing_share
    if not changing:
        for _ in range(50):
            fact = _draw_static(rng)
            if fact and fact.key not in notebook.static:
                notebook.static[fact.key] = fact.value
                return fact
    fact = _draw_changing(notebook, rng)
    notebook.changing[fact.key] = fact.value
    return fact


def ask(notebook: Notebook, rng: Random, kind: Kind | None = None) -> Answered:
    """Draws a question of a kind the notebook can answer, or one about something that it does not hold."""
    if kind == "unknown":
        return ask_unknown(notebook, rng)
    if kind is None:
        prefers_changing = rng.random() < notebook.changing_share + 0.1
        kind = "changing" if (prefers_changing and notebook.changing) or not notebook.static else "static"
    facts = notebook.changing if kind == "changing" else notebook.static
    key = rng.choice(list(facts))
    return Answered(key.question, Fact(key, facts[key]))


def ask_unknown(notebook: Notebook, rng: Random, *, changing: bool = False) -> Answered:
    """A question that the notebook does not answer; some part of what it names is usually in it."""
    facts = notebook.changing if changing else notebook.static
    while True:
        draw = rng.random()
        if changing:
            key = Key("at", (rng.choice(NAMES),)) if draw < 0.5 else Key("has", (rng.choice(OBJECTS),))
        elif draw < 0.6:
            key = Key("place", (rng.choice(NAMES), rng.choice(OBJECTS)))
            if not is_held_out(*key.subject):
                continue
        else:
            key = Key("code" if draw < 0.8 else "likes", (rng.choice(NAMES),))
        if key not in facts:
            return Answered(key.question, None)


def _draw_static(rng: Random) -> Fact | None:
    draw = rng.random()
    if draw < 0.55:
        name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
        return Fact(Key("place", (name, thing)), rng.choice(PLACES)) if is_held_out(name, thing) else None
    name = rng.choice(NAMES)
    if draw < 0.8:
        return Fact(Key("code", (name,)), "".join(rng.choice("0123456789") for _ in range(4)))
    return Fact(Key("likes", (name,)), rng.choice(FOODS))


def _draw_changing(notebook: Notebook, rng: Random) -> Fact:
    draw = rng.random()
    if draw < 0.5:
        return Fact(Key("at", (rng.choice(notebook.movers),)), rng.choice(PLACES))
    if draw < 0.85:
        item = rng.choice(notebook.items)
        held_out = [name for name in NAMES if is_held_out(name, item)]
        movers = [name for name in notebook.movers if name in held_out]
        allowed = movers if rng.random() < 0.5 else held_out
        return Fact(Key("has", (item,)), rng.choice(allowed or held_out))
    return Fact(Key("flag"), rng.choice(COLORS))


def render(messages: Sequence[Message]) -> str:
    """The text that the chat template makes of `messages`, without the prompt for an answer."""
    return "".join(f"<|{message['role']}|> {message['content']}<|end|>\n" for message in messages)


_PIECE = re.compile(r"<\|[a-z]+\|>| ?[A-Za-z]+| ?[0-9]|\s+|[^\sA-Za-z0-9]")


def count_tokens(text: str) -> int:
    """Tokens of `text` when each of its words is one token, as all words of this world are."""
    return len(_PIECE.findall(text))
