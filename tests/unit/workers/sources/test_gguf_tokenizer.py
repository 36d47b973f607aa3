"""Tokenizers of sentencepiece in GGUF metadata have the tokens that its definition gives: of all neighbours
that make a token, those with the highest score are merged first."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.tidy.tree import ROOT
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.workers.sources.gguf_tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from tidemill.workers.sources.names import SourceError

BYTE = 6
SPACE = "\u2581"
WORDS = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))[:4]).split()
TEXTS = (
    "the cluster serves the model",
    "  two  spaces\nand a line\t",
    "caf\u00e9 \u4f60\u597d \U0001f44d\U0001f3fd e\u0301",
    "<s>a<tool>b",
    "",
)


def metadata(**more: Any) -> dict[str, Any]:  # noqa: ANN401 - metadata
    """Return a vocabulary of characters and some parts of words, as the converter of llama.cpp writes it."""
    draw, parts = Random(0), dict.fromkeys(char for char in SPACE + "".join(sorted(set("".join(WORDS)))))
    for word in draw.sample(WORDS, 600):
        parts |= dict.fromkeys(f"{SPACE}{word}"[:end] for end in range(2, 12))
        parts |= dict.fromkeys(word[start : start + 2] for start in range(len(word)))
    pieces = list(parts)
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<tool>", USER_DEFINED)]
    rows = [(text, 0.0, kind) for text, kind in special]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    rows += [(text, -draw.random() * 100, NORMAL) for text in pieces]
    tokens, scores, types = map(list, zip(*rows, strict=True))
    found = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    found |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()}


def by_definition(found: dict[str, Any], text: str) -> list[int]:
    """Merge the neighbours with the highest score until none make a token."""
    tokens = found["tokenizer.ggml.tokens"]
    ids, scores = {text: index for index, text in enumerate(tokens)}, found["tokenizer.ggml.scores"]
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        joined = (ids.get(a + b) for a, b in pairwise(parts))
        merges = [(-scores[index], at) for at, index in enumerate(joined) if index is not None]
        if not merges:
            break
        _, at = min(merges)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        index
        for part in parts
        for index in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


def tokenizer_of(found: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(Vocabulary("a.gguf", found).tokenizer_json()))


def test_tokens_are_those_of_the_definition() -> None:
    found, draw = metadata(), Random(1)
    tokenizer = tokenizer_of(found)
    texts = [text for text in TEXTS if text and "<" not in text]
    texts += [" ".join(draw.sample(WORDS, 8)).replace("<", "") for _ in range(100)]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False).ids == by_definition(found, text), text
        assert tokenizer.encode(text).ids[0] == 1
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_found_in_texts() -> None:
    tokenizer = tokenizer_of(metadata())
    a, b = (tokenizer.token_to_id(f"{SPACE}{letter}") for letter in "ab")
    assert tokenizer.encode("<s>a<tool>b", add_special_tokens=False).ids == [1, a, 3, b]
    assert tokenizer.decode(tokenizer.encode("<s>a<tool>b", add_special_tokens=False).ids) == "a<tool> b"
    assert tokenizer.encode("").ids == [1]


def test_file_may_ask_for_no_space_and_no_begin() -> None:
    tokenizer = tokenizer_of(metadata(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode(" a").ids == [tokenizer.token_to_id(f"{SPACE}a")]
    assert tokenizer.encode("a").ids == [tokenizer.token_to_id("a")]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_whole_text(text: str) -> None:
    raw = tokenizer_of(metadata())
    tokenizer = FolderTokenizer(raw, None)
    ids, decoder = tokenizer.encode_inside(text), tokenizer.decoder()
    assert "".join(map(decoder.push, ids)) == raw.decode(ids)


def test_damaged_scores_and_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        tokenizer_of(metadata(scores=[1.0]))
    with pytest.raises(SourceError, match=r"has a tokenizer of the kind t5 \(default\), which is not read"):
        Vocabulary(str(tmp_path), metadata(model="t5")).tokenizer_json()
