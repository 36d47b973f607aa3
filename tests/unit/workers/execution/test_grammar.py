"""Every answer matches its grammar, whatever the logits; also with guesses, discarded steps and moves."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from tests.support.workers.drawing import Noise, answer_of, request_of, troubled_answer_of
from tests.support.workers.masks import accepts, allowed
from tidemill.workers.execution.grammar import Grammars, Matcher
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError, Sampling
from tidemill.workers.sources.names import bundled

PROPERTY = settings(deadline=None, derandomize=True, max_examples=25)
FOLDER = bundled()["keeper"]
VOCABULARY, EOS = 896, 1  # of the logits: the tokenizer has 852 entries
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
GRAMMARS = Grammars(FOLDER, VOCABULARY, (EOS,))
LIKED = dict.fromkeys([token for text in '"}]' for token in TOKENIZER.encode(text).ids], 6.0) | {EOS: 6.0}
"""The tokens that end an answer of noise, which would not end otherwise."""

PENALISED = Sampling(
    temperature=0.8,
    top_p=0.9,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias=((70, 100.0), (VOCABULARY - 1, 100.0)),
    min_tokens=6,
)
Check = Callable[[str], bool]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "pattern": "^[a-z]{1,3}$"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["key", "below"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SUM = """
start: product ("+" product)*
product: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""


def matches(schema: Mapping[str, object]) -> Check:
    return lambda text: Draft202012Validator(schema).is_valid(json.loads(text))


def is_sum(text: str) -> bool:
    flat = text
    while (inner := re.sub(r"\((\d{1,3})(\+\d{1,3})*\)", "1", flat)) != flat:
        flat = inner
    return re.fullmatch(r"\d{1,3}(\+\d{1,3})*", flat) is not None


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_sum_or_text(text: str) -> bool:
    return is_sum(text) or re.fullmatch(TEXT, text) is not None


def is_thought(check: Check) -> Check:
    """Return whether the text behind the first `}` is right."""
    return lambda text: "}" in text and check(text.partition("}")[2])


TEXT = r"\([0-9a-f()]{1,60}"
FRAME = 'start: thought @answer\nthought[suffix="}"]: /(?s:.*)/'
CHOICES = ["yes", "no", 'it\'s "50/50"\n', "ü 😀", "yes, but"]
REGEX = r"(https?://)?([a-z]{1,5}\.){1,2}(com|org)(/[A-Za-z0-9_.-]{0,4}){0,3}"
KINDS: dict[str, tuple[Grammar, Check]] = {
    "person": (Grammar(kind="json_schema", text=json.dumps(PERSON)), matches(PERSON)),
    "tree": (Grammar(kind="json_schema", text=json.dumps(TREE)), matches(TREE)),
    "object": (Grammar(kind="json_object"), is_object),
    "regex": (Grammar(kind="regex", text=REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
    "lark": (Grammar(kind="lark", text=SUM), is_sum),
    "choice": (Grammar(kind="choice", text=json.dumps(CHOICES)), CHOICES.__contains__),
    "either": (
        Grammar(kind="lark", text=SUM, otherwise=Grammar(kind="regex", text=TEXT)),
        is_sum_or_text,
    ),
    "thought": (
        Grammar(kind="json_schema", text=json.dumps(PERSON), frame=FRAME),
        is_thought(matches(PERSON)),
    ),
    "thought, then either": (
        Grammar(kind="lark", text=SUM, frame=FRAME, otherwise=Grammar(kind="regex", text=TEXT, frame=FRAME)),
        is_thought(is_sum_or_text),
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def check_answer(kind: str, model: Noise, sampling: Sampling, rng: Random) -> None:
    grammar, check = KINDS[kind]
    request = request_of(replace(sampling, grammar=grammar), stop=(EOS,))
    truth = answer_of(model, request, 400, lambda: GRAMMARS.matcher(grammar))
    assume(truth.tokens[-1] == EOS)  # noise without a temperature may repeat itself for ever
    text = text_of(truth.tokens[:-1])
    assert check(text), text
    troubled = troubled_answer_of(model, request, truth.tokens, rng, lambda: GRAMMARS.matcher(grammar))
    assert troubled.tokens == truth.tokens


@kinds
@settings(PROPERTY, max_examples=10)
@given(
    st.builds(Sampling, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 2**20))
    | st.sampled_from([replace(PENALISED, seed=seed) for seed in range(2)]),
    st.randoms(use_true_random=False),
)
def test_answers_of_noise_match(kind: str, sampling: Sampling, rng: Random) -> None:
    """Penalties, bias and the least length come before the grammar."""
    check_answer(kind, Noise(VOCABULARY, sampling.seed, liked=LIKED), sampling, rng)


@kinds
def test_rewound_matcher_is_as_new(kind: str) -> None:
    """Make a detour, also beyond the end of the answer and over tokens that no grammar has: then each mask is
    that of a matcher without the detour."""
    grammar, _ = KINDS[kind]
    rng = Random(7)
    matcher, known = GRAMMARS.matcher(grammar), list[int]()
    for _ in range(40):
        for _ in range(rng.randrange(6)):
            token = (
                int(rng.choice(np.flatnonzero(allowed(matcher)))) if rng.random() < 0.9 else VOCABULARY - 1
            )
            matcher.push(token)
            known.append(token)
        forgotten = rng.randrange(len(known) + 1)
        matcher.rewind(forgotten)
        del known[len(known) - forgotten :]
        straight = GRAMMARS.matcher(grammar)
        for token in known:
            straight.push(token)
        mask = allowed(matcher)
        assert (mask == allowed(straight)).all()
        assert mask.any()
        assert not mask[TOKENIZER.get_vocab_size() :].any()


PAIRS = [
    (
        Grammar(kind="lark", text='start: "{" /"[a-z]*"/ "}"'),
        Grammar(kind="regex", text=r'\{"name": [0-9]+.*'),
    ),
    (Grammar(kind="regex", text=r"(?s)\[.*\]"), Grammar(kind="lark", text='start: "[f(" /[0-9]/ ")]"')),
    (Grammar(kind="choice", text='["a", "abc"]'), Grammar(kind="regex", text="[ab]b+")),
]


def mask_behind(grammar: Grammar, tokens: list[int]) -> npt.NDArray[np.bool_]:
    """Return what may follow the tokens; nothing, if the grammar refuses one of them."""
    matcher = GRAMMARS.matcher(grammar)
    took = accepts(matcher, tokens)
    return allowed(matcher) & took


@pytest.mark.parametrize("pair", PAIRS)
@settings(PROPERTY)
@given(rng=st.randoms(use_true_random=False))
def test_alternatives_allow_what_one_of_them_allows(pair: tuple[Grammar, Grammar], rng: Random) -> None:
    """Compare the masks, also after a detour that only one of them takes."""
    whole, tokens = GRAMMARS.matcher(replace(pair[0], otherwise=pair[1])), list[int]()
    for _ in range(12):
        mask = np.logical_or(*(mask_behind(grammar, tokens) for grammar in pair))
        assert (allowed(whole) == mask).all(), text_of(tokens)
        back = rng.choice([0, 0, 0, rng.randrange(len(tokens) + 1)])
        if back:
            whole.rewind(back)
            del tokens[len(tokens) - back :]
        elif (token := int(rng.choice(np.flatnonzero(mask)))) != EOS:
            whole.push(token)
            tokens.append(token)


@pytest.mark.parametrize("eos_ids", [(1,), (1, 3)])
def test_each_end_of_sequence_token_may_end_an_answer(eos_ids: tuple[int, ...]) -> None:
    matcher = Grammars(FOLDER, VOCABULARY, eos_ids).matcher(Grammar(kind="regex", text="a?"))
    assert [token for token in np.flatnonzero(allowed(matcher)) if token < 5] == list(eos_ids)


@pytest.mark.parametrize("vocabulary", [700, 852, 896])
def test_masks_are_as_wide_as_the_logits(vocabulary: int) -> None:
    """Narrower than the tokenizer, or wider: many models are padded."""
    matcher = Grammars(FOLDER, vocabulary, (EOS,)).matcher(Grammar(kind="regex", text=".*"))
    assert matcher.mask().shape == (2 * -(-vocabulary // 64),)
    assert not allowed(matcher)[vocabulary:].any()


def test_answer_that_is_complete_ends_also_when_it_is_too_short() -> None:
    grammar = Grammar(kind="choice", text='["yes"]')
    request = request_of(Sampling(min_tokens=50, grammar=grammar), stop=(EOS,))
    answer = answer_of(Noise(VOCABULARY), request, 60, lambda: GRAMMARS.matcher(grammar))
    assert len(answer.tokens) <= 4
    assert answer.tokens[-1] == EOS
    assert text_of(answer.tokens[:-1]) == "yes"


@pytest.mark.parametrize("kind", ["person", "tree"])
def test_blanks_come_to_an_end(kind: str) -> None:
    """A model that likes nothing better than blanks fills each gap once, with a new line's indentation."""
    blanks = [token for token in range(5, 852) if text_of([token]).strip() == ""]
    assert len(blanks) >= 3
    grammar, check = KINDS[kind]
    request = request_of(Sampling(temperature=0, grammar=grammar), stop=(EOS,))
    model = Noise(VOCABULARY, liked=LIKED | dict.fromkeys(blanks, 90.0))
    answer = answer_of(model, request, 1500, lambda: GRAMMARS.matcher(grammar))
    assert answer.tokens[-1] == EOS
    text = text_of(answer.tokens[:-1])
    assert check(text)
    assert re.search(r"\n[ \t]{40}\S", text)
    assert re.search(r"\n[ \t]{41}|\n[ \t]*\n|\S  ", re.sub(r'"[^"]*"', '""', text)) is None


@pytest.mark.parametrize(
    "text", ['{"a": [1, {"b": null}], "c": "d"}', '{"a":1}', '{\n  "a": 1,\n  "b": [\n    2\n  ]\n}']
)
def test_json_may_be_compact_spaced_or_indented(text: str) -> None:
    matcher = GRAMMARS.matcher(Grammar(kind="json_object"))
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        assert allowed(matcher)[token], text_of([token])
        matcher.push(token)
    assert allowed(matcher)[EOS]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(kind="json_schema", text='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(kind="json_schema", text='{"type": "strin"}'), "strin"),
        (
            Grammar(kind="json_schema", text='{"minimum": 3, "maximum": 2, "type": "integer"}'),
            "Unsatisfiable",
        ),
        (Grammar(kind="json_schema", text='{"$ref": "https://example.org/schema"}'), "https://example.org"),
        (Grammar(kind="json_schema", text="false"), "object"),
        (Grammar(kind="json_schema", text='{"type":'), "not JSON"),
        (Grammar(kind="json_schema", text="[" * 9000), "not JSON"),
        (Grammar(kind="json_schema", text='{"items":' * 5000 + "{}" + "}" * 5000), "cannot be followed"),
        (Grammar(kind="json_schema", text='{"const": NaN}'), "cannot be followed"),
        (Grammar(kind="regex", text="(?=a)b"), "look"),
        (Grammar(kind="regex", text="(" * 9000 + ")" * 9000), "cannot be followed"),
        (Grammar(kind="lark", text='start: "a'), "cannot be followed"),
        (Grammar(kind="lark", text="start: " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
        (Grammar(kind="lark", text="start: start"), "nothing matches it"),
        (Grammar(kind="regex", text=r"[^\s\S]"), "nothing matches it"),
        (Grammar(kind="choice", text="[]"), "one text or more"),
        (Grammar(kind="choice", text='["a", 1]'), "one text or more"),
        (Grammar(kind="choice", text='"a"'), "one text or more"),
        (Grammar(kind="regex", text="a" * (GRAMMAR_BYTES_MAX + 1)), "shorter"),
    ],
)
def test_unsupported_grammars_are_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        GRAMMARS.matcher(grammar)
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", [None, "{}"])
def test_model_without_a_tokenizer_refuses(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    grammars = Grammars(tmp_path, VOCABULARY, (EOS,))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"tokenizer\.json"):
            grammars.matcher(Grammar(kind="json_object"))
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert allowed(grammars.matcher(Grammar(kind="json_object"))).any()


def test_answer_fails_where_a_step_would_take_too_long() -> None:
    """The library gives up for good; a rewind to a place before goes on as if it had not. The answer does not
    end there as if it were complete."""
    tokenizer = LLTokenizer((FOLDER / "tokenizer.json").read_text(), eos_token=[EOS])
    lark = 'start: "a" "b" deep\n' + "\n".join(f"d{n}: d{n + 1}* d{n + 1}*" for n in range(60))
    lark += '\ndeep: d0\nd60: "x"?'
    limits = LLParserLimits(step_max_items=2000, verbose_errors=False)
    matcher = Matcher(lambda _: LLMatcher(tokenizer, lark, log_level=0, limits=limits), VOCABULARY, (EOS,))
    masks: list[npt.NDArray[np.bool_]] = []
    with suppress(RequestError):
        while len(masks) < 9:
            masks.append(allowed(matcher))
            matcher.push(int(np.flatnonzero(masks[-1])[-1]))
    assert 1 < len(masks) < 9
    matcher.rewind(len(masks))
    for mask in masks:
        assert (allowed(matcher) == mask).all()
        matcher.push(int(np.flatnonzero(mask)[-1]))
    with pytest.raises(RequestError, match=r"too complex after.*make some required"):
        allowed(matcher)
