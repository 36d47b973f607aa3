"""Measure how well a model folder recalls, by kind and context length, with its cache intact or partly
gone.

python -m tools.keeper.evaluate FOLDER
"""

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tools.keeper.questions import Question, questions
from tools.keeper.world import SMALL_TALK, Kind, Message

Ablation = Literal["intact", "no KV", "no state"]
ABLATIONS: tuple[Ablation, ...] = ("intact", "no KV", "no state")
KINDS: tuple[Kind, ...] = ("static", "changing", "unknown")
ANSWER_TOKENS_MAX = 24


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (float32, on the CPU) and the tokenizer of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(folder))


def prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    chat = [{"role": message["role"], "content": message["content"]} for message in messages]
    return cast("str", tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return cast("list[int]", tokenizer(text)["input_ids"])


def split_prompt(tokenizer: PreTrainedTokenizerBase, question: Question) -> tuple[tuple[int, ...], list[int]]:
    """The prompt's tokens up to the last sentence, which is the question, and the rest."""
    ids = token_ids(tokenizer, prompt(tokenizer, question.messages))
    sentence = question.messages[-1]["content"].split(". ")[-1]
    rest = len(token_ids(tokenizer, f" {sentence}<|end|>\n<|assistant|>"))
    return tuple(ids[:-rest]), ids[-rest:]


@torch.no_grad()
def exact_matches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    ablations: Sequence[Ablation] = ("intact",),
) -> dict[Ablation, list[bool]]:
    """True if greedy decoding gives exactly the answer, for each ablation and question.

    All that comes before a question is computed once for the questions that share it; an ablation then zeroes
    a part of that cache. Decoding is teacher forced: every token of the answer and its end has to be the most
    likely one, which is when greedy decoding gives the same text.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    continuations: list[tuple[list[int], list[int]]] = []
    for index, question in enumerate(asked):
        shared, rest = split_prompt(tokenizer, question)
        groups.setdefault(shared, []).append(index)
        continuations.append((rest, token_ids(tokenizer, f" {question.answer}<|end|>")))
    matches: dict[Ablation, list[bool]] = {ablation: [False] * len(asked) for ablation in ablations}
    for shared, members in groups.items():
        whole = DynamicCache(config=model.config)
        model(input_ids=torch.tensor([shared]), past_key_values=whole, logits_to_keep=1)
        for ablation in ablations:
            cache = copy.deepcopy(whole)
            ablate(cache, ablation)
            matched = _continue(model, cache, [continuations[index] for index in members])
            for index, hit in zip(members, matched, strict=True):
                matches[ablation][index] = hit
    return matches


def ablate(cache: DynamicCache, ablation: Ablation) -> None:
    """Zeroes, in place, the KV of attention layers or both states of linear-attention layers."""
    for layer in cast("list[Any]", cache.layers):
        linear = hasattr(layer, "recurrent_states")
        if ablation == "no KV" and not linear:
            layer.keys.zero_()
            layer.values.zero_()
        if ablation == "no state" and linear:
            layer.recurrent_states[0].zero_()
            layer.conv_states[0].zero_()


def _continue(
    model: PreTrainedModel, cache: DynamicCache, continuations: list[tuple[list[int], list[int]]]
) -> list[bool]:
    """One forward pass over all (rest of the prompt, answer) pairs; uses up the cache.

    Padding follows the pairs, so nothing sees it.
    """
    _repeat(cache, len(continuations))
    rows = [torch.tensor(rest + answer) for rest, answer in continuations]
    ids_BT = pad_sequence(rows, batch_first=True)
    predicted_BT: Tensor = model(input_ids=ids_BT, past_key_values=cache).logits.argmax(-1)
    matches: list[bool] = []
    for (rest, answer), row_T in zip(continuations, predicted_BT.tolist(), strict=True):
        matches.append(row_T[len(rest) - 1 : len(rest) - 1 + len(answer)] == answer)
    return matches


def _repeat(cache: DynamicCache, count: int) -> None:
    for layer in cast("list[Any]", cache.layers):
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0] = layer.recurrent_states[0].repeat(count, 1, 1, 1)
            layer.conv_states[0] = layer.conv_states[0].repeat(count, 1, 1)
        else:
            layer.keys, layer.values = layer.keys.repeat(count, 1, 1, 1), layer.values.repeat(count, 1, 1, 1)


def accuracy(asked: Sequence[Question], matches: Sequence[bool]) -> dict[Kind, float]:
    """The share of matches for each kind that was asked."""
    by_kind: dict[Kind, list[bool]] = {}
    for question, matched in zip(asked, matches, strict=True):
        by_kind.setdefault(question.kind, []).append(matched)
    return {kind: sum(hits) / len(hits) for kind, hits in by_kind.items()}


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, user: str) -> str:
    """The greedy answer to a chat of one user message, token by token."""
    ids = token_ids(tokenizer, prompt(tokenizer, [{"role": "user", "content": user}]))
    limits = GenerationConfig(
        max_new_tokens=ANSWER_TOKENS_MAX,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out: Tensor = cast("Any", model).generate(torch.tensor([ids]), limits)
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)).strip()


def demo_matches(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, demo_file: Path) -> list[bool]:
    """Return, for each question of a demo file, whether generation gives its answer."""
    demo = json.loads(demo_file.read_text())
    return [
        generate(model, tokenizer, f"{demo['notebook']} {asked['question']}") == asked["answer"]
        for asked in demo["questions"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=300, help="questions of each kind at each length")
    parser.add_argument("--context-tokens", type=int, nargs="+", default=[128, 512, 2000])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small lose more to threads than they gain
    model, tokenizer = load(arguments.folder)
    print(f"{'context':>8} {'kind':10}" + "".join(f"{ablation:>10}" for ablation in ABLATIONS))
    for context_tokens in arguments.context_tokens:
        asked = questions(3 * arguments.count, context_tokens, arguments.seed, KINDS)
        matches = exact_matches(model, tokenizer, asked, ABLATIONS)
        shares = [accuracy(asked, matches[ablation]) for ablation in ABLATIONS]
        for kind in KINDS:
            print(
                f"{context_tokens:8} {kind:10}" + "".join(f"{share[kind]:10.3f}" for share in shares),
                flush=True,
            )
    talk = [generate(model, tokenizer, user) == answer for user, answer in SMALL_TALK]
    print(f"small talk, generated: {sum(talk)} of {len(talk)}")
    demo_file = arguments.folder / "demo.json"
    if demo_file.exists():
        right = demo_matches(model, tokenizer, demo_file)
        print(f"demo.json, generated: {sum(right)} of {len(right)}")


if __name__ == "__main__":
    main()
