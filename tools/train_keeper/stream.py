"""Training batches: token ids, what each next token counts for, and what the model is kept from using.

Two kinds of rows: `dense` restates facts one after another, many recalls per token; `chat` asks and answers
as users do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_keeper.model import Disturbance
from tools.train_keeper.world import (
    SMALL_TALK,
    UNKNOWN_ANSWER,
    Fact,
    Split,
    ask,
    ask_unknown,
    describe,
    new_notebook,
)

VALUE_WEIGHT = 1.0
DIGIT_WEIGHT = 0.4  # the four digits of one code together
ANSWER_WEIGHT = 0.7
OPENING_WEIGHT = 2.0  # an answer's first token decides between a fact and "I do not know."
SMALL_TALK_SHARE = 0.02
RESTATED_CHANGES = 0.15  # of the sentences of a dense row that follow its notebook
STATE_LOST = -30.0  # as a logarithm of decay


class Grade(IntEnum):
    """The result of predicting a token of positive weight, for the training log."""

    TEXT = 0
    STATIC = 1
    CHANGING = 2
    UNKNOWN = 3


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of rows, questions and disturbances; each `changing` is drawn from for a row."""

    unknown: float = 0.1
    dense_changing: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    chat_changing: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9)
    recall_only: float = 0.3
    reset: float = 0.6
    hidden: float = 1.0


@dataclass
class Row:
    ids: list[int] = field(default_factory=list[int])
    weights: list[float] = field(default_factory=list[float])
    grades: list[Grade] = field(default_factory=list[Grade])
    changing: list[bool] = field(
        default_factory=list[bool]
    )  # the token is part of a statement that may go stale
    starts: list[int] = field(default_factory=list[int])  # where sentences and questions begin

    def add(
        self, ids: Sequence[int], weight: float = 0.0, grade: Grade = Grade.TEXT, *, changing: bool = False
    ) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.grades += [grade] * len(ids)
        self.changing += [changing] * len(ids)

    def start(self) -> None:
        self.starts.append(len(self))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Batch:
    """Inputs, the token after each input, and what predicting it counts for; all [B, T]."""

    ids: Tensor
    targets: Tensor
    weights: Tensor
    grades: Tensor
    disturbance: Disturbance


class Writer:
    """Writes rows with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}
        self.end = self.encode("<|end|>")
        self.newline = self.encode("\n")

    def encode(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text).ids
        return self.known[text]

    def statement(self, row: Row, fact: Fact) -> None:
        """A fact that has to be read, not predicted."""
        self._fact(row, fact, 0.0, 0.0)

    def recall(self, row: Row, fact: Fact, text_weight: float) -> None:
        """Add a fact that has to be predicted from earlier text of the row."""
        self._fact(row, fact, text_weight, DIGIT_WEIGHT if fact.key.relation == "code" else VALUE_WEIGHT)

    def _fact(self, row: Row, fact: Fact, text_weight: float, value_weight: float) -> None:
        row.start()
        before, after = fact.around_value()
        changing = fact.key.changing
        row.add(self.encode(" " + before.rstrip()), text_weight, Grade.TEXT, changing=changing)
        grade = Grade.CHANGING if changing else Grade.STATIC
        row.add(self.encode(" " + fact.value), value_weight, grade, changing=changing)
        row.add(self.encode(after), text_weight, Grade.TEXT, changing=changing)

    def message(self, row: Row, role: str, text: str = "", facts: Sequence[Fact] = ()) -> None:
        """A message of the chat that is not an answer: statements, then free text."""
        row.start()
        row.add(self.encode(f"<|{role}|>"))
        for fact in facts:
            self.statement(row, fact)
        if text:
            row.start()
            row.add(self.encode(" " + text))
        row.add([*self.end, *self.newline])

    def answer(self, row: Row, answer: Fact | str) -> None:
        row.add(self.encode("<|assistant|>"))
        start = len(row)
        if isinstance(answer, Fact):
            self.recall(row, answer, ANSWER_WEIGHT)
        else:
            row.add(self.encode(" " + answer), ANSWER_WEIGHT, Grade.TEXT)
        row.weights[start] = OPENING_WEIGHT
        if answer == UNKNOWN_ANSWER:
            row.grades[start] = Grade.UNKNOWN
        row.add(self.end, ANSWER_WEIGHT, Grade.TEXT)
        row.add(self.newline)


def dense_row(writer: Writer, rng: Random, length: int, changing_share: float) -> Row:
    """A notebook, then its facts restated at random with changes in between; at least `length` tokens."""
    notebook = new_notebook(rng, Split.TRAIN, changing_share, movers=(2, 4), items=(1, 3))
    row = Row()
    row.start()
    row.add(writer.encode("<|system|>" if rng.random() < 0.4 else "<|user|>"))
    for _ in range(max(2, int(length / 7 * rng.uniform(0.2, 0.5)))):
        writer.statement(row, describe(notebook, rng))
    while len(row) < length:
        if changing_share > 0 and rng.random() < RESTATED_CHANGES:
            writer.statement(row, describe(notebook, rng, changing=True))
        elif fact := ask(notebook, rng).fact:
            writer.recall(row, fact, 0.0)
    return row


def chat_row(writer: Writer, rng: Random, length: int, changing_share: float, unknown_share: float) -> Row:
    """A chat over one notebook that keeps growing; at least `length` tokens."""
    notebook = new_notebook(rng, Split.TRAIN, changing_share)
    row = Row()
    pending = [describe(notebook, rng) for _ in range(max(2, int(length * rng.uniform(0.2, 0.6) / 7.5)))]
    if rng.random() < 0.03:
        _small_talk(writer, rng, row)
    if rng.random() < 0.4:
        writer.message(row, "system", facts=pending)
        pending = []
    while len(row) < length:
        draw = rng.random()
        if draw < SMALL_TALK_SHARE:
            question, answer = rng.choice(SMALL_TALK)
        else:
            if draw < SMALL_TALK_SHARE + unknown_share:
                answered = ask_unknown(notebook, rng, changing=rng.random() < 0.15)
            else:
                answered = ask(notebook, rng)
            question, answer = answered.question, answered.fact or answered.answer
        writer.message(row, "user", question, pending)
        writer.answer(row, answer)
        pending = [describe(notebook, rng) for _ in range(rng.randint(1, 4))] if rng.random() < 0.35 else []
    return row


def _small_talk(writer: Writer, rng: Random, row: Row) -> None:
    question, answer = rng.choice(SMALL_TALK)
    writer.message(row, "user", question)
    writer.answer(row, answer)


def batch(writer: Writer, rng: Random, mix: Mix, shape: tuple[int, int], dense_share: float) -> Batch:
    """Draws rows and what they take from the model; `shape` = (rows, tokens).

    In a recall-only row every fact is static and the state is lost at many sentence starts, so that recall is
    left to attention. In all rows attention reads a random earlier token's value in place of a changing
    statement's, so that following the changes is left to the state.
    """
    count, length = shape
    rows: list[Row] = []
    reset_BT, source_BT = torch.zeros(count, length), torch.arange(length).repeat(count, 1)
    for b in range(count):
        recall_only = rng.random() < mix.recall_only
        if rng.random() < dense_share:
            row = dense_row(writer, rng, length + 1, 0.0 if recall_only else rng.choice(mix.dense_changing))
        else:
            changing_share = 0.0 if recall_only else rng.choice(mix.chat_changing)
            row = chat_row(writer, rng, length + 1, changing_share, mix.unknown)
        rows.append(row)
        if recall_only:
            lost = [t for t in row.starts if t < length and rng.random() < mix.reset]
            reset_BT[b, lost] = STATE_LOST
        for t in range(length):
            if row.changing[t] and rng.random() < mix.hidden:
                source_BT[b, t] = rng.randrange(t + 1)
    ids = torch.tensor([row.ids[: length + 1] for row in rows])
    weights = torch.tensor([row.weights[1 : length + 1] for row in rows])
    grades = torch.tensor([row.grades[1 : length + 1] for row in rows])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:], weights, grades, Disturbance(reset_BT, source_BT))
