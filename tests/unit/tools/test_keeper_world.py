"""The keeper's world: held-out pairs stay out of training, and an independent reader finds every answer."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tools.train_keeper.questions import Question, demo, questions
from tools.train_keeper.stream import Grade, Mix, Writer, batch, chat_row, dense_row
from tools.train_keeper.tokenizer import build
from tools.train_keeper.words import COLORS, FOODS, NAMES, OBJECTS, PLACES
from tools.train_keeper.world import (
    SMALL_TALK,
    UNKNOWN_ANSWER,
    Message,
    Split,
    conversation,
    count_tokens,
    is_held_out,
    render,
)

pytestmark = pytest.mark.slow

UNTIMED = settings(deadline=None, max_examples=40)  # speed is not what is tested here
MODEL = Path(__file__).parents[3] / "workers" / "models" / "keeper"
SEEDS = st.integers(0, 2**32)
SPLITS = st.sampled_from(list(Split))


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


def test_tenth_of_the_pairs_is_held_out_for_every_name_and_object() -> None:
    by_name = [sum(is_held_out(name, thing) for thing in OBJECTS) for name in NAMES]
    by_object = [sum(is_held_out(name, thing) for name in NAMES) for thing in OBJECTS]
    assert sum(by_name) == len(NAMES) * len(OBJECTS) // 10
    assert min(by_name) > 0
    assert min(by_object) > 0


@UNTIMED
@given(seed=SEEDS, split=SPLITS, token_count=st.integers(20, 600))
def test_every_answer_follows_from_the_text(seed: int, split: Split, token_count: int) -> None:
    messages = conversation(Random(seed), token_count, split)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    answers = [answer for answer in answers if answer not in dict(SMALL_TALK).values()]
    read = answers_by_reading(messages)
    assert [value_of(answer) for answer in answers] == [value for _, value in read]
    assert all(
        (answer == UNKNOWN_ANSWER) == (value == "") for answer, (_, value) in zip(answers, read, strict=True)
    )


@UNTIMED
@given(seed=SEEDS, token_count=st.integers(20, 600))
def test_training_text_never_brings_a_held_out_pair_together(seed: int, token_count: int) -> None:
    pairs = pairs_together(render(conversation(Random(seed), token_count, Split.TRAIN)))
    assert not any(is_held_out(name, thing) for name, thing in pairs)


@UNTIMED
@given(seed=SEEDS, length=st.integers(16, 400), changing_share=st.floats(0, 1), dense=st.booleans())
def test_training_rows_are_tokenized_as_their_text_and_hold_no_held_out_pair(
    tokenizer: Tokenizer, seed: int, length: int, changing_share: float, *, dense: bool
) -> None:
    writer, rng = Writer(tokenizer), Random(seed)
    if dense:
        row = dense_row(writer, rng, length, changing_share)
    else:
        row = chat_row(writer, rng, length, changing_share, 0.1)
    text = tokenizer.decode(row.ids, skip_special_tokens=False)
    assert tokenizer.encode(text).ids == row.ids
    assert len(row.ids) == len(row.weights) == len(row.grades) == len(row.changing) >= length
    assert not any(is_held_out(name, thing) for name, thing in pairs_together(text))


@UNTIMED
@given(seed=SEEDS)
def test_questions_of_a_training_row_follow_from_its_text(tokenizer: Tokenizer, seed: int) -> None:
    row = dense_row(Writer(tokenizer), Random(seed), 300, 0.5)
    known: dict[str, str] = {}
    text = tokenizer.decode(row.ids, skip_special_tokens=True)
    for start, sentence in zip(row.starts[1:], sentences(text), strict=True):
        statement = subject_of_statement(sentence)
        assert statement is not None
        about, value = statement
        is_recall = any(row.weights[start : start + count_tokens(" " + sentence)])
        assert not is_recall or known[about] == value
        known[about] = value


@UNTIMED
@given(seed=SEEDS)
def test_batch_hides_changing_values_from_attention_and_static_ones_from_the_state(
    tokenizer: Tokenizer, seed: int
) -> None:
    mix = Mix(recall_only=0.5)
    drawn = batch(Writer(tokenizer), Random(seed), mix, (4, 96), 0.5)
    source, reset = drawn.disturbance.value_source, drawn.disturbance.reset
    assert source.shape == reset.shape == drawn.ids.shape == drawn.targets.shape == (4, 96)
    assert bool((drawn.ids[:, 1:] == drawn.targets[:, :-1]).all())
    for b in range(4):
        assert all(int(source[b, t]) <= t for t in range(96))
        has_changing = bool((drawn.grades[b] == Grade.CHANGING).any())
        assert not (has_changing and bool((reset[b] < 0).any()))


def test_build_gives_the_shipped_tokenizer(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)  # pyright: ignore[reportUnknownMemberType] (transformers types it in part)
    assert (tmp_path / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert (tmp_path / "chat_template.jinja").read_bytes() == (MODEL / "chat_template.jinja").read_bytes()


@UNTIMED
@given(seed=SEEDS)
def test_tokenizer_gives_the_text_back(tokenizer: Tokenizer, seed: int) -> None:
    text = render(conversation(Random(seed), 120, Split.ANY))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert count_tokens(text) == len(ids)


def prompt_tokens(tokenizer: Tokenizer, question: Question) -> int:
    return len(tokenizer.encode(render(question.messages) + "<|assistant|>").ids)


@UNTIMED
@given(seed=SEEDS, context_tokens=st.integers(64, 2100), count=st.integers(1, 14))
def test_held_out_questions(tokenizer: Tokenizer, seed: int, context_tokens: int, count: int) -> None:
    asked = questions(count, context_tokens, seed, per_notebook=5)
    assert asked == questions(count, context_tokens, seed, per_notebook=5)
    assert len(asked) == count
    for index, question in enumerate(asked):
        assert question.kind == ("static", "changing")[index % 2]
        assert question.messages[-1]["role"] == "user"
        assert context_tokens - 25 <= prompt_tokens(tokenizer, question) <= context_tokens
        _, value = answers_by_reading(question.messages)[-1]
        assert value_of(question.answer) == value != ""
        pairs = pairs_together(render(question.messages))
        assert all(is_held_out(name, thing) for name, thing in pairs)


@UNTIMED
@given(seed=SEEDS)
def test_unknown_questions_have_no_answer_in_the_text(seed: int) -> None:
    for question in questions(4, 300, seed, kinds=("unknown",)):
        assert answers_by_reading(question.messages)[-1][1] == ""
        assert question.answer == UNKNOWN_ANSWER


def test_seeds_give_different_questions() -> None:
    assert questions(3, 200, 1) != questions(3, 200, 2)


def test_demo_is_that_of_the_package(tokenizer: Tokenizer) -> None:
    shipped = json.loads((MODEL / "demo.json").read_text())
    assert shipped == demo()
    assert 300 <= len(tokenizer.encode(shipped["notebook"]).ids) <= 340
    assert {asked["kind"] for asked in shipped["questions"]} == {"static", "changing"}
    for asked in shipped["questions"]:
        text = f"{shipped['notebook']} {asked['question']}"
        assert answers_by_reading([{"role": "user", "content": text}])[-1][1] == value_of(asked["answer"])
