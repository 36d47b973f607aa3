"""Builds the keeper's tokenizer: byte-level BPE over the world's words, and the chat template.

python -m tools.train_keeper.tokenizer OUT
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tidemill.workers.sources.names import bundled
from tools.train_keeper.words import COLORS, FOODS, NAMES, OBJECTS, PLACES
from tools.train_keeper.world import SMALL_TALK, Split, conversation, render

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (bundled()["keeper"] / "chat_template.jinja").read_text()
CONVERSATIONS = 2000
CONVERSATION_TOKENS = 300
SEED = 5


def corpus() -> Iterator[str]:
    """Text whose word counts decide the vocabulary, so a change here changes every token id."""
    rng = Random(SEED)
    for _ in range(CONVERSATIONS):
        yield render(conversation(rng, CONVERSATION_TOKENS, Split.ANY))
    for question, answer in SMALL_TALK:
        yield from [f" {question} {answer}"] * 300
    for word in NAMES + OBJECTS + PLACES + COLORS + FOODS:
        yield from [f" {word}"] * 50


def build() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    pieces = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]|\s+|[^\sA-Za-z0-9]"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=20,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    pad, end, *roles = SPECIAL_TOKENS
    folder_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        additional_special_tokens=roles,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    folder_tokenizer.chat_template = CHAT_TEMPLATE
    return folder_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    out: Path = parser.parse_args().out
    tokenizer = build()
    tokenizer.save_pretrained(out)
    print(f"{len(tokenizer)} tokens in {out}")


if __name__ == "__main__":
    main()
