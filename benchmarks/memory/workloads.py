"""Seeded workloads for the memory of one worker: prompts, lengths, and dependencies."""

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from benchmarks.memory.served_model import FIRST_TOKEN, VOCABULARY, answer_token
from tidemill.cluster.bench.workloads import Item, Workload

BLOCK_TOKENS = 512


def long_prompts(rng: Random, *, documents: int = 30, questions: int = 3, in_turn: int = 10) -> Workload:
    """Ask a few questions about each document of 6k to 24k tokens: pages are scarce. The next question about
    a document comes after one about each of `in_turn` documents."""
    items: list[Item] = []
    for first in range(0, documents, in_turn):
        groups = range(first, min(first + in_turn, documents))
        texts = {group: _tokens(rng, rng.randrange(6_000, 24_000)) for group in groups}
        for position in range(questions):
            items += [
                Item(
                    tokens=texts[group] + _tokens(rng, rng.randrange(16, 129)),
                    max_tokens=rng.randrange(128, 513),
                    group=group,
                    position=position,
                    shared_tokens=len(texts[group]) if position else 0,
                    after=len(items) + group - first - len(groups) if position else None,
                )
                for group in groups
            ]
    return Workload("long-prompts", tuple(items))


def long_generations(rng: Random, *, prompts: int = 300) -> Workload:
    """Ask short questions after one system prompt, with long answers: states are scarce."""
    system = _tokens(rng, 256)
    return Workload(
        "long-generations",
        tuple(
            Item(
                tokens=system + _tokens(rng, rng.randrange(32, 257)),
                max_tokens=rng.randrange(256, 1025),
                group=group,
                position=0,
                shared_tokens=256,
            )
            for group in range(prompts)
        ),
    )


def alternating(rng: Random, *, phases: int = 4, documents: int = 12, prompts: int = 120) -> Workload:
    """Alternate phases of both; each phase queues behind the one before it."""
    items: list[Item] = []
    for phase in range(phases):
        part = long_generations(rng, prompts=prompts) if phase % 2 else long_prompts(rng, documents=documents)
        first = len(items)
        items += [
            replace(
                item,
                group=first + item.group,
                after=None if item.after is None else first + item.after,
            )
            for item in part.items
        ]
    return Workload("alternating", tuple(items))


def mixed(rng: Random, *, prompts: int = 300) -> Workload:
    """Send unrelated, mostly short prompts of 64 to 16k tokens, with answers of 64 to 1,024."""
    return Workload(
        "mixed",
        tuple(
            Item(
                tokens=_tokens(rng, int(64 * 2 ** rng.uniform(0, 8))),
                max_tokens=int(64 * 2 ** rng.uniform(0, 4)),
                group=group,
                position=0,
                shared_tokens=0,
            )
            for group in range(prompts)
        ),
    )


def multi_turn(rng: Random, *, conversations: int = 60, open_at_once: int = 12) -> Workload:
    """Hold conversations of 1 to 12 turns, most of them short, after one of three system prompts.

    Questions and answers have mixed lengths. Turns of `open_at_once` conversations are interleaved.
    """
    systems = [_tokens(rng, length) for length in (512, 2_048, 6_144)]
    queue = [(number, _turns(rng, number, rng.choice(systems))) for number in range(conversations)]
    return Workload("multi-turn", tuple(_mixed(rng, queue, open_at_once)))


def shared_prefix(rng: Random, *, prefixes: int = 24, prompts: int = 300) -> Workload:
    """Send prompts with one of many prefixes of 512 to 16k tokens, few of them popular."""
    texts = [_tokens(rng, int(512 * 2 ** rng.uniform(0, 5))) for _ in range(prefixes)]
    weights = [1 / (1 + rank) for rank in range(prefixes)]
    groups = rng.choices(range(prefixes), weights, k=prompts)
    return Workload(
        "shared-prefix",
        tuple(
            Item(
                tokens=texts[group] + _tokens(rng, int(32 * 2 ** rng.uniform(0, 5))),
                max_tokens=rng.randrange(16, 65),
                group=group,
                position=0,
                shared_tokens=0,
            )
            for group in groups
        ),
    )


def replay(lines: Sequence[str], *, one_in: int = 1) -> Workload:
    """Replay a request trace as published for Mooncake (Qin et al., FAST 2025).

    Each line is a JSON object with `input_length`, `output_length` and `hash_ids`. The ids name the
    blocks of 512 tokens of the prompt, of which the last may be shorter. Equal ids are equal
    prefixes. Answers are cut to 32 tokens, because only hits are counted. One conversation in
    `one_in` is replayed; its second block identifies it, because nearly all prompts share the
    first.
    """
    items: list[Item] = []
    for group, line in enumerate(lines):
        record = json.loads(line)
        if record["hash_ids"][:2][-1] % one_in:
            continue
        tokens = tuple(block for block in record["hash_ids"] for _ in range(BLOCK_TOKENS))
        items.append(
            Item(
                tokens=tokens[: record["input_length"]],
                max_tokens=max(1, min(record["output_length"], 32)),
                group=group,
                position=0,
                shared_tokens=0,
            )
        )
    return Workload("mooncake-trace", tuple(items))


def _turns(rng: Random, conversation: int, system: tuple[int, ...]) -> list[Item]:
    """Return the turns of a conversation, whose history has the answers to its seed."""
    items: list[Item] = []
    history = system
    for turn in range(min(12, 1 + int(rng.expovariate(1 / 3.5)))):
        question = _tokens(rng, int(32 * 2 ** rng.uniform(0, 7)))
        answer = int(32 * 2 ** rng.uniform(0, 4))
        history += question
        items.append(
            Item(
                tokens=history,
                max_tokens=answer,
                group=conversation,
                position=turn,
                shared_tokens=len(items[-1].tokens) if turn else 0,
            )
        )
        history += tuple(answer_token(conversation, len(history) + i) for i in range(answer))
    return items


def _mixed(rng: Random, queue: Sequence[tuple[int, list[Item]]], open_at_once: int) -> list[Item]:
    """Interleave the turns of conversations, `open_at_once` of which are open at a time."""
    waiting, items, last = list(reversed(queue)), list[Item](), dict[int, int]()
    open_ones: list[tuple[int, list[Item]]] = []
    while waiting or open_ones:
        while waiting and len(open_ones) < open_at_once:
            open_ones.append(waiting.pop())
        number, turns = rng.choice(open_ones)
        turn = turns.pop(0)
        if not turns:
            open_ones.remove((number, turns))
        items.append(replace(turn, after=last.get(number)))
        last[number] = len(items) - 1
    return items


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(FIRST_TOKEN, VOCABULARY), k=count))
