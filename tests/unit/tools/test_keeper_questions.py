"""The held-out questions of keeper: an independent reader finds every answer in the text."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tools.keeper.questions import demo, questions
from tools.keeper.words import COLORS, FOODS, NAMES, OBJECTS, PLACES
from tools.keeper.world import UNKNOWN_ANSWER, Message, count_tokens, is_held_out, render

pytestmark = pytest.mark.slow

UNTIMED = settings(deadline=None, max_examples=40)  # speed is not what is tested here
MODEL = Path(__file__).parents[3] / "workers" / "models" / "keeper"
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module", name="tokenizer")
def the_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def subject_of_statement(sentence: str) -> tuple[str, str] | None:
    """(what it is about, value) of a statement, read from the text alone."""
    for pattern, about in (
        (r"(\w+) keeps the (\w+) in the (\w+)\.", "place {0} {1}"),
        (r"The code of (\w+) is (\d{4})\.", "code {0}"),
        (r"(\w+) is now at the (\w+)\.", "at {0}"),
        (r"The flag is now (\w+)\.", "flag"),
        (r"The (\w+) is now with (\w+)\.", "has {0}"),
        (r"(\w+) likes (\w+)\.", "likes {0}"),
    ):
        if match := re.fullmatch(pattern, sentence):
            *subject, value = match.groups()
            return about.format(*subject), value
    return None


def subject_of_question(sentence: str) -> str | None:
    for pattern, about in (
        (r"Where does (\w+) keep the (\w+)\?", "place {0} {1}"),
        (r"What is the code of (\w+)\?", "code {0}"),
        (r"Where is (\w+) now\?", "at {0}"),
        (r"What color is the flag\?", "flag"),
        (r"Who has the (\w+)\?", "has {0}"),
        (r"What does (\w+) like\?", "likes {0}"),
    ):
        if match := re.fullmatch(pattern, sentence):
            return about.format(*match.groups())
    return None


def sentences(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"[^.?!]+[.?!]", text)]


def answers_by_reading(messages: list[Message]) -> list[tuple[str, str]]:
    """Return (question, value or "" when unknown) in order, from the messages of user and system."""
    known: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        for sentence in sentences(message["content"]):
            if statement := subject_of_statement(sentence):
                known[statement[0]] = statement[1]
            elif about := subject_of_question(sentence):
                found.append((sentence, known.get(about, "")))
    return found


def value_of(answer: str) -> str:
    statement = subject_of_statement(answer)
    return statement[1] if statement else ""


def pairs_together(text: str) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for sentence in re.split(r"[.?!]|<\|end\|>", text):
        words = set(re.findall(r"\w+", sentence))
        found |= {(name, thing) for name in words & set(NAMES) for thing in words & set(OBJECTS)}
    return found


def test_words_are_distinct_and_each_is_one_token(tokenizer: Tokenizer) -> None:
    words = [*NAMES, *OBJECTS, *PLACES, *COLORS, *FOODS]
    assert len(set(words)) == len(words)
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in words)


@UNTIMED
@given(seed=SEEDS, context_tokens=st.integers(64, 2100), count=st.integers(1, 14))
def test_held_out_questions(tokenizer: Tokenizer, seed: int, context_tokens: int, count: int) -> None:
    asked = questions(count, context_tokens, seed, per_notebook=5)
    assert asked == questions(count, context_tokens, seed, per_notebook=5)
    assert len(asked) == count
    for index, question in enumerate(asked):
        assert question.kind == ("static", "changing")[index % 2]
        assert question.messages[-1]["role"] == "user"
        text = render(question.messages) + "<|assistant|>"
        tokens = tokenizer.encode(text).ids
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        assert count_tokens(text) == len(tokens)
        assert context_tokens - 25 <= len(tokens) <= context_tokens
        given = [message["content"] for message in question.messages if message["role"] == "assistant"]
        read = [value for _, value in answers_by_reading(question.messages)]
        assert [value_of(answer) for answer in (*given, question.answer)] == read
        assert read[-1]
        pairs = pairs_together(render(question.messages))
        assert all(is_held_out(name, thing) for name, thing in pairs)


@UNTIMED
@given(seed=SEEDS)
def test_unknown_questions_have_no_answer_in_the_text(seed: int) -> None:
    for question in questions(4, 300, seed, kinds=("unknown",)):
        assert answers_by_reading(question.messages)[-1][1] == ""
        assert question.answer == UNKNOWN_ANSWER


def test_demo_is_that_of_the_package(tokenizer: Tokenizer) -> None:
    shipped = json.loads((MODEL / "demo.json").read_text())
    assert shipped == demo()
    assert 300 <= len(tokenizer.encode(shipped["notebook"]).ids) <= 340
    assert {asked["kind"] for asked in shipped["questions"]} == {"static", "changing"}
    for asked in shipped["questions"]:
        text = f"{shipped['notebook']} {asked['question']}"
        assert answers_by_reading([{"role": "user", "content": text}])[-1][1] == value_of(asked["answer"])
